"""Mutual TLS between the processes of a run (`cluster.tls`): at the door, and in JAX's coordination service behind it.

Every process has the same folder, with the names that Kubernetes gives to the keys of a TLS secret. Who has no certificate by
that authority, with a URI that begins as ours, is no process of the run. What devices say to each other (Gloo, NCCL, TPU links)
is not encrypted.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Any

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
URI = "ejdist://"  # how a name in the certificate of a process begins; host names are not compared
_HANDSHAKE = 10.0  # seconds


def files_of(folder: str) -> tuple[str, str, str]:
    """Returns the files of certificate, key and authority."""
    place = Path(folder).expanduser()
    return str(place / CERTIFICATE), str(place / KEY), str(place / AUTHORITY)


def context(folder: str, *, server: bool) -> ssl.SSLContext:
    """Returns what makes connections with the certificate of this process, of which the other side needs one too.

    Raises:
      ValueError: a file is missing or not what it should be; names it.
    """
    certificate, key, authority = files_of(folder)
    for file in (certificate, key, authority):
        try:
            Path(file).read_bytes()
        except OSError as error:
            raise ValueError(
                f"cluster.tls = {folder!r} must be a folder with {CERTIFICATE}, {KEY} and {AUTHORITY}: {file} cannot be read "
                f"({error.strerror})"
            ) from error
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname, made.verify_mode = False, ssl.CERT_REQUIRED
    try:
        made.load_cert_chain(certificate, key)
        made.load_verify_locations(authority)
    except (ssl.SSLError, OSError) as error:
        raise ValueError(
            f"cluster.tls = {folder!r}: {CERTIFICATE} and {KEY} must be a certificate and its key, and {AUTHORITY} that of its "
            f"authority, all as PEM ({error.strerror or error})"
        ) from error
    return made


def connected(folder: str, connection: socket.socket) -> ssl.SSLSocket:
    """Returns a connection to the door, encrypted, once both sides have shown their certificates.

    Raises:
      ssl.SSLError: the other side has no certificate of this run, or does not speak TLS. OSError: the connection has ended.
    """
    connection.settimeout(_HANDSHAKE)
    made = context(folder, server=False).wrap_socket(connection)
    if not is_ours(made):
        made.close()
        raise ssl.SSLError(1, f"its certificate has no URI that begins with {URI}")
    return made


def is_ours(connection: socket.socket) -> bool:
    """Returns whether the certificate of the other side, which the authority has signed, is of a process."""
    if not isinstance(connection, ssl.SSLSocket):
        return False
    shown: Any = connection.getpeercert() or {}
    return any(kind == "URI" and value.startswith(URI) for kind, value in shown.get("subjectAltName", ()))


def of_jax(folder: str | None) -> dict[str, Any]:
    """Returns the arguments of `jax.distributed.initialize`."""
    if folder is None:
        return {}
    certificate, key, authority = files_of(folder)
    return {
        "mtls_cert_file": certificate, "mtls_key_file": key, "mtls_ca_file": authority, "mtls_peer_uri_prefix": URI,
        "verify_secure_credentials": True,
    }  # fmt: skip
