"""Secure aggregation: the server sees only the sum of the clients' vectors.

The protocol is that of Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving
Machine Learning" (CCS 2017), Fig. 4.

Each client adds two kinds of masks to its vector. It shares a pairwise mask with each other client,
which the two add with opposite signs, so that these masks cancel in the sum. It also adds a self
mask that only this client knows. If a client fails after the masks were agreed on, the other
clients give the server shares of that client's key, from which the server computes its pairwise
masks. If a client is present, the others give shares of its self mask. They never give both for the
same client.

    primitives.py    fixed-point numbers modulo 2^64, whose sums are exact; Shamir's secret sharing;
                     the common secrets of two clients: X25519, HKDF, ChaCha20 and
                     ChaCha20-Poly1305, all from `cryptography`; the messages as bytes
    client.py, server.py    the two parties, with four exchanges per sum

docs/deployment.md states which parties are protected. The server may follow the protocol, or lie
about which clients are present, and it may collude with any number of clients below the threshold.
"""
