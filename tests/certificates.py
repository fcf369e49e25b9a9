"""Certificates for tests of `cluster.tls`: made anew, as Kubernetes has them in a TLS secret."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def _certificate(name, of, uri, authority):
    """Returns a certificate of a key; `authority`: (its certificate, its key), None: it is its own."""
    now, subject = datetime.datetime.now(datetime.UTC), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer, key = (subject, of) if authority is None else (authority[0].subject, authority[1])
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(of.public_key())
    made = made.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(hours=1))
    made = made.not_valid_after(now + datetime.timedelta(hours=1))
    made = made.add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
    if uri:
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
        made = made.add_extension(names, critical=False)
    return made.sign(key, hashes.SHA256())


def make(folder: Path, uri: str = "ejdist://run", authority: tuple | None = None) -> tuple:
    """Writes tls.crt, tls.key and ca.crt into a new folder, and returns the authority, for other folders."""
    folder.mkdir(parents=True)
    if authority is None:
        key = ec.generate_private_key(ec.SECP256R1())
        authority = _certificate("authority", key, "", None), key
    mine = ec.generate_private_key(ec.SECP256R1())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "tls.crt").write_bytes(_certificate("process", mine, uri, authority).public_bytes(pem))
    (folder / "tls.key").write_bytes(mine.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    (folder / "ca.crt").write_bytes(authority[0].public_bytes(pem))
    return authority
