"""What the tools talk to: a resolver, and a host with a web server, git, packages and SSH, both at ordinary addresses.

It runs in the tools' own image, in the network namespace of the test's Internet, and says on standard output what it was asked.
"""
import base64, hashlib, io, json, os, shutil, socket, ssl, struct, subprocess, sys, tarfile, threading, time, zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SITE, ORIGIN, RESOLVER, HOST, ROUTER = sys.argv[1:6]
REPO = "/srv/repo.git"


def say(*words):
    # In one piece: many threads speak.
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


# Names.

FIXED = {
    "raw.example.com": [("A", ORIGIN)],
    "private.example.com": [("A", "10.0.0.5")],
    "rfc1918.example.com": [("A", "192.168.7.7")],
    "metadata.example.com": [("A", "169.254.169.254")],
    "loopback.example.com": [("A", "127.0.0.1")],
    "anything.example.com": [("A", "0.0.0.0")],
    "carrier.example.com": [("A", "100.100.100.200")],
    "azure.example.com": [("A", "168.63.129.16")],
    "pool.example.com": [("A", "198.18.0.1")],
    "host.example.com": [("A", HOST)],
    "router.example.com": [("A", ROUTER)],
    "mapped.example.com": [("AAAA", "::ffff:10.0.0.5")],
    "nat64.example.com": [("AAAA", "64:ff9b::a00:5")],
    "local6.example.com": [("AAAA", "::1")],
    "alias.example.com": [("CNAME", "inner.corp.test"), ("A", "10.0.0.5")],
    "chain.example.com": [("CNAME", "edge.cdn.test"), ("A", SITE)],
    "none.example.com": None,
}
flips = 0


def records(name):
    global flips
    if name == "flip.example.com":
        flips += 1
        return [("A", SITE if flips % 2 else "10.0.0.5")]
    return FIXED.get(name, [("A", SITE)])


def wire(name):
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"


def answer(message):
    at, labels = 12, []
    while message[at]:
        labels.append(message[at + 1 : at + 1 + message[at]].decode())
        at += 1 + message[at]
    name, (kind,) = ".".join(labels), struct.unpack(">H", message[at + 1 : at + 3])
    say("name", name)
    # Twice for each dial, A and AAAA: what flips does so by the A.
    found = records(name) if kind == 1 or name != "flip.example.com" else []
    body, owner = [], b"\xc0\x0c"
    for sort, value in found or []:
        if sort == "CNAME":
            body.append(owner + struct.pack(">HHIH", 5, 1, 0, len(wire(value))) + wire(value))
            owner = wire(value)
        elif {"A": 1, "AAAA": 28}[sort] == kind:
            data = socket.inet_pton(socket.AF_INET if sort == "A" else socket.AF_INET6, value)
            body.append(owner + struct.pack(">HHIH", kind, 1, 0, len(data)) + data)
    code = 3 if found is None else 0
    head = message[:2] + bytes([0x81, 0x80 | code, 0, 1, 0, len(body), 0, 0, 0, 0])
    return head + message[12 : at + 5] + b"".join(body)


def resolve():
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((RESOLVER, 53))
    while True:
        message, peer = server.recvfrom(1500)
        server.sendto(answer(message), peer)


# Packages, made when they are asked for.


def wheel():
    files = {
        "tiny.py": "VALUE = 42\n",
        "tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        "tiny-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files["tiny-1.0.dist-info/RECORD"] = "".join(f"{name},,\n" for name in [*files, "tiny-1.0.dist-info/RECORD"])
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return out.getvalue()


def module():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, text in {
            "package/package.json": '{"name":"tiny","version":"1.0.0","main":"index.js"}',
            "package/index.js": "module.exports = 42\n",
        }.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text), 0o644
            archive.addfile(entry, io.BytesIO(text.encode()))
    return out.getvalue()


MODULE = module()
INTEGRITY = "sha512-" + base64.b64encode(hashlib.sha512(MODULE).digest()).decode()
MANIFEST = {
    "name": "tiny",
    "version": "1.0.0",
    "main": "index.js",
    "dist": {"tarball": "https://npm.example.com/tiny/-/tiny-1.0.0.tgz", "integrity": INTEGRITY},
}
PAGES = {
    "/simple/tiny/": ("text/html", lambda: b'<!DOCTYPE html><a href="/wheels/tiny-1.0-py3-none-any.whl">tiny-1.0-py3-none-any.whl</a>'),
    "/wheels/tiny-1.0-py3-none-any.whl": ("application/zip", wheel),
    "/tiny": (
        "application/json",
        lambda: json.dumps({"name": "tiny", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": MANIFEST}}).encode(),
    ),
    "/tiny/-/tiny-1.0.0.tgz": ("application/octet-stream", lambda: MODULE),
}
# Answers that two readers could frame differently, or that go on after their end.
HOSTILE = {
    "/hostile/both": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nevil",
    "/hostile/twice": b"Content-Length: 4\r\nContent-Length: 9\r\n\r\nevil evil",
    "/hostile/split": b"X: a\rb\r\nContent-Length: 4\r\n\r\nevil",
    "/hostile/chunks": b"Transfer-Encoding: chunked\r\n\r\n4;a\nb\r\nevil\r\n0\r\n\r\n",
}
met = threading.Barrier(100, timeout=60)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def log_request(self, code="-", size="-"):
        pass

    def send(self, status, body=b"", kind="text/plain", **headers):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def parse_request(self):
        if not super().parse_request():
            return False
        say("http", self.command, self.path, self.headers.get("Host", "-"))
        return True

    def do_GET(self):
        path, _, query = self.path.partition("?")
        if path in PAGES:
            kind, make = PAGES[path]
            self.send(200, make(), kind)
        elif path in HOSTILE:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n" + HOSTILE[path])
            self.close_connection = True
        elif path == "/redirect":
            self.send(302, Location="https://denied.example.net/secret")
        elif path == "/big":
            left, piece = int(query), bytes(range(250)) * 4000
            self.send_response(200)
            self.send_header("Content-Length", query)
            self.end_headers()
            while left > 0:
                self.wfile.write(piece[:left])
                left -= len(piece)
        elif path == "/slow":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for part in b"slow", b"ly ", b"but ", b"surely":
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                self.wfile.flush()
                time.sleep(1)
            self.wfile.write(b"0\r\n\r\n")
        elif path == "/meet":
            # Nobody gets an answer before a hundred have come.
            met.wait()
            self.send(200, b"met\n")
        elif path == "/ws":
            self.websocket()
        elif path == "/repo.git/info/refs":
            service = query.removeprefix("service=")
            refs = subprocess.run([*service.split("-", 1), "--stateless-rpc", "--advertise-refs", REPO], capture_output=True).stdout
            line = f"# service={service}\n"
            self.send(200, f"{len(line) + 4:04x}{line}0000".encode() + refs, f"application/x-{service}-advertisement")
        elif path == "/":
            self.send(200, f"hello from {self.headers.get('Host')}\n".encode())
        else:
            self.send(404, b"nothing here\n")

    do_HEAD = do_GET

    def do_POST(self):
        body = self.body()
        if self.headers.get("Content-Encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        service = self.path.rpartition("/")[2]
        if self.path.startswith("/repo.git/") and service in ("git-upload-pack", "git-receive-pack"):
            ran = subprocess.run([*service.split("-", 1), "--stateless-rpc", REPO], input=body, capture_output=True)
            self.send(200, ran.stdout, f"application/x-{service}-result")
        else:
            self.send(200, f"{len(body)} {hashlib.sha256(body).hexdigest()}\n".encode())

    do_PUT = do_POST

    def websocket(self):
        accept = hashlib.sha1((self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()
        self.send_response(101)
        for name, value in ("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", base64.b64encode(accept).decode()):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.flush()
        self.close_connection = True
        while head := self.rfile.read(2):
            kind, size = head[0] & 15, head[1] & 127
            if size == 126:
                (size,) = struct.unpack(">H", self.rfile.read(2))
            key = self.rfile.read(4)
            data = bytes(byte ^ key[n % 4] for n, byte in enumerate(self.rfile.read(size)))
            length = bytes([size]) if size < 126 else b"\x7e" + struct.pack(">H", size)
            self.wfile.write(bytes([0x80 | kind]) + length + data)
            self.wfile.flush()
            if kind == 8:
                return


class Server(ThreadingHTTPServer):
    request_queue_size = 200
    context = None

    def finish_request(self, request, address):
        if not self.context:
            self.RequestHandlerClass(request, address, self)
            return
        request.settimeout(60)
        with self.context.wrap_socket(request, server_side=True) as tls:
            self.RequestHandlerClass(tls, address, self)

    def handle_error(self, request, address):
        pass


def secure():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain("/etc/site/server.pem", "/etc/site/server.key")
    context.set_alpn_protocols(["http/1.1"])
    context.sni_callback = lambda connection, name, _: say("sni", name or "-")
    return context


# Bytes.


def echo(peer):
    while data := peer.recv(65536):
        peer.sendall(data)


def first(peer):
    """Ends its direction before it listens."""
    peer.sendall(b"goodbye\n")
    peer.shutdown(socket.SHUT_WR)
    heard = b""
    while data := peer.recv(65536):
        heard += data
    say("heard", heard.decode().strip())


def mail(peer):
    """As much of SMTP as it takes to begin TLS."""
    peer.sendall(b"220 mail\r\n")
    while line := peer.recv(1000):
        if line.upper().startswith(b"STARTTLS"):
            peer.sendall(b"220 go\r\n")
            with secure().wrap_socket(peer, server_side=True) as tls:
                tls.recv(1)
            return
        peer.sendall(b"250-mail\r\n250 STARTTLS\r\n")


def serve(port, each):
    listener = socket.create_server((SITE, port), backlog=100)

    def one(peer):
        try:
            with peer:
                each(peer)
        except OSError:
            pass

    while True:
        threading.Thread(target=one, args=(listener.accept()[0],), daemon=True).start()


def main():
    os.umask(0o22)
    shutil.copytree("/etc/site/repo.git", REPO)
    shutil.copy("/etc/site/host_key", "/run/host_key")
    os.chmod("/run/host_key", 0o600)
    os.makedirs("/run/sshd", exist_ok=True)
    daemon = ["/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null"]
    for option in (f"ListenAddress={SITE}", "HostKey=/run/host_key", "AuthorizedKeysFile=/etc/site/authorized_keys",
                   "UsePAM=no", "StrictModes=no", "PidFile=none", "PermitRootLogin=yes"):
        daemon += ["-o", option]
    subprocess.Popen(daemon)
    Server.allow_reuse_address = True
    plain, tls = Server((SITE, 80), Handler), Server((SITE, 443), Handler)
    tls.context = secure()
    tasks = [(resolve,), (plain.serve_forever,), (tls.serve_forever,),
             (serve, 7000, echo), (serve, 7003, first), (serve, 7025, mail)]
    for task, *arguments in tasks:
        threading.Thread(target=task, args=arguments, daemon=True).start()
    while True:
        try:
            socket.create_connection((SITE, 22)).close()
            break
        except OSError:
            time.sleep(0.1)
    say("ready")
    threading.Event().wait()


main()
