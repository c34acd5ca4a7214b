"""The TLS settings of the server, made anew whenever the certificate's files are read again.

In place of hypercorn's, which overwrites OpenSSL's default options and asks on the terminal for the password of an
encrypted key. Called by ``server``.
"""

from __future__ import annotations

import ssl

_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"  # for TLS 1.2; RFC 9113, 9.2.2 allows HTTP/2 no others


def tls_context(certificate: str, key: str, client_ca: str | None = None) -> ssl.SSLContext:
    """TLS 1.2 or newer, HTTP/2 or HTTP/1.1 by ALPN.

    Args:
        certificate: PEM file with the chain.
        key: PEM file with the private key, not encrypted.
        client_ca: PEM file with authorities; clients need a certificate from one of them.

    Raises:
        OSError: a file cannot be read or used (ssl.SSLError is one).
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION  # RFC 9113, 9.2.1
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols(["h2", "http/1.1"])
    context.load_cert_chain(certificate, key, password=_no_password)
    if client_ca is not None:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> str:
    raise ssl.SSLError("the key is encrypted; write it without a password")
