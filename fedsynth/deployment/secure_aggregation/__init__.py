"""Sums of clients' vectors of which the server sees only the sum, after Bonawitz et al.,
"Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017), Fig. 4.

Each client adds to its vector a mask that it shares with each other client, with opposite signs, so
that they cancel in the sum, and its own mask. If a client is lost after the masks were agreed on,
the others give the server shares of its key, from which its masks follow. For a client that is
present, they give shares of its own mask; never both for one client.

    primitives.py    fixed-point numbers modulo 2^64, whose sums are exact; Shamir's secret sharing;
                     the common secrets of two clients: X25519, HKDF, ChaCha20 and
                     ChaCha20-Poly1305, all from `cryptography`
    messages.py      the messages between clients and server, as bytes
    client.py, server.py    the two parties, four exchanges per sum

docs/deployment.md states who is protected from whom: from a server that follows the protocol, or
one that lies about who is present, colluding with any number of clients below the threshold.
"""
