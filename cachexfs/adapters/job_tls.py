"""TLS that proves membership of the job: certificates from a CA whose key comes from the shared secret.

Role: adaptor. Every node derives the same CA key (HKDF of the secret and the job's name, then a P-256 key), keeps
it in memory, and issues itself one certificate for serving and for calling (etcd's gateway calls its own
server with the server's certificate). Who does not know the secret cannot make a certificate that the others
accept. The CA certificates that nodes write differ in their signature and agree in all that is verified: name
and key. Validity does not depend on the nodes' clocks. Called by the daemon and the command line, at the start.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cachexfs.errors import UsageError

SECRET_BYTES_MIN = 16
_LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")
_NOT_BEFORE = datetime(2020, 1, 1, tzinfo=UTC)
_NOT_AFTER = datetime(2120, 1, 1, tzinfo=UTC)
#: Order of P-256 (SEC 2, section 2.4.2).
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A node's credentials: the CA's certificate, and one file with the node's key and certificate (mode 0600)."""

    ca: Path
    node: Path

    def client_context(self) -> ssl.SSLContext:
        """For calls to members of the job; checks the name of the host that is called."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return self._load(context)

    def server_context(self) -> ssl.SSLContext:
        """For serving members of the job only."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return self._load(context)

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cafile=self.ca)
        context.load_cert_chain(self.node)
        return context


class JobAuthority:
    """The job's certificate authority. Raises ``UsageError`` for a secret that is too short."""

    def __init__(self, secret: bytes, job: str) -> None:
        if len(secret) < SECRET_BYTES_MIN:
            raise UsageError(f"the secret has {len(secret)} bytes: use at least {SECRET_BYTES_MIN} random ones")
        # 48 bytes, so that the remainder is uniform to 2**-128 (FIPS 186-5, A.2.1)
        seed = HKDF(hashes.SHA256(), 48, salt=b"cachexfs job authority 1", info=job.encode()).derive(secret)
        self._key = ec.derive_private_key(int.from_bytes(seed, "big") % (_P256_ORDER - 1) + 1, ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "CacheX FS job")])

    def issue(self, directory: Path, node: str, hosts: Sequence[str]) -> TlsFiles:
        """Write credentials for a node that the others reach as ``hosts`` (names or addresses).

        Replaces earlier ones atomically: a server that reads them at each handshake always finds a pair.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = TlsFiles(directory / "ca.pem", directory / "node.pem")
        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        certificate = self._certificate(key.public_key(), node, hosts)
        _write_secret(files.ca, self._ca_certificate().public_bytes(serialization.Encoding.PEM))
        _write_secret(files.node, pem + certificate.public_bytes(serialization.Encoding.PEM))
        return files

    def _ca_certificate(self) -> x509.Certificate:
        public = self._key.public_key()
        return (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(1)
            .not_valid_before(_NOT_BEFORE)
            .not_valid_after(_NOT_AFTER)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(ca=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def _certificate(self, public: ec.EllipticCurvePublicKey, node: str, hosts: Sequence[str]) -> x509.Certificate:
        names = [_general_name(host) for host in dict.fromkeys([*hosts, *_LOCAL_HOSTS])]
        usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node[:64])]))
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(secrets.randbits(127) + 1)
            .not_valid_before(_NOT_BEFORE)
            .not_valid_after(_NOT_AFTER)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(ca=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write_secret(path: Path, data: bytes) -> None:
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        fresh.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
