"""A Flower federation of real processes on this machine, with encryption and authentication."""

import datetime
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from running import free_port

BIN = Path(sys.executable).parent


def write_certificates(folder):
    """Write `ca.crt`, `server.pem` and `server.key` for 127.0.0.1."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def signed(name, key, issuer, issuer_key, is_ca):
        now = datetime.datetime.now(datetime.timezone.utc)
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = x509.CertificateBuilder(issuer or subject, subject, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(1))
        builder = builder.add_extension(x509.BasicConstraints(is_ca, None), True)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
        return builder.sign(issuer_key, hashes.SHA256())

    ca_key, key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    ca = signed("authority", ca_key, None, ca_key, True)
    server = signed("server", key, ca.subject, ca_key, False)
    pem = serialization.Encoding.PEM
    (folder / "ca.crt").write_bytes(ca.public_bytes(pem))
    (folder / "server.pem").write_bytes(server.public_bytes(pem))
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "server.key").write_bytes(key.private_bytes(pem, *plain))


def write_key(path):
    """Write a client's OpenSSH key, and its public key beside it."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    private = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, *private))
    public = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    path.with_suffix(".pub").write_bytes(key.public_key().public_bytes(*public) + b"\n")


class Federation:
    """A SuperLink, and a node for each client folder that `partition --export` has written.

    Args:
        folder: Folder of all files. `parts` in it has the clients' folders.
        clients: Number of clients.
        isolation: Whether the SuperLink starts the server of a run itself (`subprocess`), or `fit` is it (`process`).
    """

    def __init__(self, folder, clients, isolation="process"):
        self.folder, self.clients, self.isolation, self.port = folder, clients, isolation, free_port()
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }
        self.superlink = None
        self.nodes, self.fits = {}, []
        (folder / "home").mkdir()
        write_certificates(folder)
        connection = f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{folder / "ca.crt"}"\n'
        (folder / "home" / "config.toml").write_text(f"[superlink.federation]\n{connection}")
        for client in range(clients):
            write_key(folder / f"key-{client}")

    def start(self, *words, log, cwd=None):
        with open(self.folder / log, "ab") as file:
            return subprocess.Popen(
                [str(word) for word in words], stdout=file, stderr=file, cwd=cwd or self.folder, env=self.environment
            )

    def start_superlink(self):
        tls = ("--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key")
        options = ("--enable-supernode-auth", "--isolation", self.isolation, "--database", "flower.db")
        options += ("--disable-runtime-dependency-installation",)
        where = ("--host", "127.0.0.1", "--port", self.port)
        self.superlink = self.start("flower-superlink", *tls, *options, *where, log="superlink.log")
        wait_until(lambda: is_open(self.port), 60)

    def register(self, client):
        done = self.flwr("supernode", "register", self.folder / f"key-{client}.pub", "federation")
        assert done.returncode == 0, done.stderr + done.stdout

    def flwr(self, *words):
        words = ["flwr", *(str(word) for word in words)]
        return subprocess.run(words, capture_output=True, text=True, env=self.environment, timeout=60)

    def start_node(self, client, key=None, authority=None):
        words = "node", "client.yaml", "--superlink", f"127.0.0.1:{self.port}"
        security = "--certificate", authority or self.folder / "ca.crt"
        security += "--key", key or self.folder / f"key-{client}"
        folder = self.folder / "parts" / f"client-{client}"
        command = [sys.executable, "-m", "fl_lightning", *words, *security]
        self.nodes[client] = self.start(*command, log=f"node-{client}.log", cwd=folder)

    def fit(self, *words):
        """Start `fl-lightning fit`."""
        process = self.start(sys.executable, "-m", "fl_lightning", "fit", *words, log="fit.log")
        self.fits.append(process)
        return process

    def run(self, app, run_dir):
        """Start a run whose server the SuperLink starts."""
        done = self.flwr("run", app, "federation", "--run-config", f'run-dir="{run_dir}"')
        assert done.returncode == 0, done.stdout + done.stderr

    def stop(self):
        for process in [*self.fits, *self.nodes.values(), self.superlink]:
            if process and process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


def is_open(port):
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def wait_until(condition, seconds):
    """Wait until a condition holds, and return its value.

    Raises:
        TimeoutError: It does not hold in time.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.1)
    raise TimeoutError
