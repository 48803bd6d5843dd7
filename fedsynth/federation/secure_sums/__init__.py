"""Sums of clients' vectors of which the server sees the sum alone, after Bonawitz et al.,
"Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017), Fig. 4.

Each client adds to its vector a mask that it shares with each other client, with opposite signs, so
that they cancel in the sum, and one of its own. Where a client is lost after masks were agreed on,
the others give the server shares of its key, from which its masks follow; of those that are there
they give shares of their own masks; never both of one client.

    primitives.py    fixed-point numbers modulo 2^64, whose sums are exact; Shamir's secret sharing;
                     what two clients have in common: X25519, HKDF, ChaCha20 and
                     ChaCha20-Poly1305, all of them `cryptography`'s
    parcels.py       what clients and server send each other, as bytes
    client.py, server.py    the two parties, four exchanges a sum

Whom it protects from whom is in docs/deployment.md: a server that follows the protocol, or one that
lies about who is there, and any number of clients below the threshold with it.
"""
