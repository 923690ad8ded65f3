"""Secure aggregation as a protocol, for simulation and study: a server that follows it learns the
sum of the clients' whole numbers, and nothing else.

K. Bonawitz, V. Ivanov, B. Kreuter, A. Marcedone, H. B. McMahan, S. Patel, D. Ramage, A. Segal,
K. Seth: *Practical Secure Aggregation for Privacy-Preserving Machine Learning*, ACM CCS 2017,
https://doi.org/10.1145/3133956.3133982.

Client u of a round masks its vector x_u, mod 2**ring:

    y_u = x_u + PRG(b_u) + Σ_{v>u} PRG(s_uv) − Σ_{v<u} PRG(s_uv)

s_uv is a secret of the pair (X25519 of its mask keys), b_u one of its own. Pairwise masks cancel in
Σ y_u. Every client gives a share of b_u and of its private mask key to each other one (Shamir, t of
n, sealed for the receiver). Of a client whose y_u arrived the server asks for shares of b_u, of one
that dropped out for shares of its mask key, and of no client for both.

Differs from the paper: the rounds that need signatures are left out, so the server is trusted to
follow the protocol (honest but curious). See docs/methods/secure-aggregation.md.
"""

from leakgauge.secure.client import Client
from leakgauge.secure.messages import Session
from leakgauge.secure.run import Outcome, run
from leakgauge.secure.server import Server

__all__ = ["Client", "Outcome", "Server", "Session", "run"]
