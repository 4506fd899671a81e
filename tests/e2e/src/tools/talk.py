"""In the guest: connections that no other tool makes. Prints a line for each; what went wrong is on the line."""
import base64, ipaddress, os, socket, ssl, struct, time


def connect(name, port):
    return socket.create_connection((name, port), timeout=20)


def rest(peer):
    data = b""
    while part := peer.recv(65536):
        data += part
    return data


class Client:
    """TLS whose records leave here in whatever pieces."""

    def __init__(self, name, offers=("http/1.1",)):
        context = ssl.create_default_context()
        context.set_alpn_protocols(list(offers))
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname=name)
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            pass
        self.hello = self.outgoing.read()

    def finish(self, peer):
        """The rest of the handshake, and a page."""
        def patiently(step):
            while True:
                try:
                    result = step()
                    peer.sendall(self.outgoing.read())
                    return result
                except ssl.SSLWantReadError:
                    if waiting := self.outgoing.read():
                        peer.sendall(waiting)
                    data = peer.recv(65536)
                    if not data:
                        raise EOFError("closed")
                    self.incoming.write(data)
        patiently(self.tls.do_handshake)
        self.tls.write(b"GET / HTTP/1.1\r\nHost: www.example.com\r\n\r\n")
        peer.sendall(self.outgoing.read())
        answer = b""
        while not answer.endswith(b"\n") or not answer.partition(b"\r\n\r\n")[2]:
            part = patiently(lambda: self.tls.read(1000))
            if not part:
                raise EOFError("closed")
            answer += part
        return answer.partition(b"\r\n\r\n")[2].decode().strip()


def pieces(bytes_a_segment, bytes_a_record, offers=("http/1.1",), least=0):
    client = Client("www.example.com", offers)
    body, hello = client.hello[5:], client.hello
    assert len(hello) >= least, len(hello)
    if bytes_a_record:
        parts = [body[at : at + bytes_a_record] for at in range(0, len(body), bytes_a_record)]
        hello = b"".join(b"\x16\3\1" + struct.pack(">H", len(part)) + part for part in parts)
    with connect("www.example.com", 443) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(hello), bytes_a_segment):
            peer.sendall(hello[at : at + bytes_a_segment])
        return client.finish(peer)


def extended(kind):
    """A hello with one extension more."""
    hello = Client("www.example.com").hello
    extension = struct.pack(">HH", kind, 14) + bytes([0, 0, 1, 0, 1, 7, 0, 0, 0, 4, 1, 2, 3, 4])
    body = bytearray(hello[9:] + extension)
    # Version, random, session, suites, compression; then the length of the extensions.
    at = 34
    at += 1 + body[at]
    at += 2 + struct.unpack_from(">H", body, at)[0]
    at += 1 + body[at]
    struct.pack_into(">H", body, at, struct.unpack_from(">H", body, at)[0] + len(extension))
    message = b"\1" + struct.pack(">I", len(body))[1:] + body
    with connect("www.example.com", 443) as peer:
        peer.sendall(b"\x16\3\1" + struct.pack(">H", len(message)) + message)
        return "answered" if peer.recv(65536) else "closed"


def websocket(name, secure):
    peer = connect(name, 443 if secure else 80)
    if secure:
        peer = ssl.create_default_context().wrap_socket(peer, server_hostname=name)
    with peer:
        key = base64.b64encode(os.urandom(16)).decode()
        peer.sendall(f"GET /ws HTTP/1.1\r\nHost: {name}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
                     f"Sec-WebSocket-Key: {key}\r\n\r\n".encode())
        stream = peer.makefile("rb")
        status = stream.readline().decode().strip()
        while stream.readline().strip():
            pass
        if " 101 " not in status:
            return status
        for text in b"hello", b"x" * 300:
            length = bytes([0x80 | len(text)]) if len(text) < 126 else b"\xfe" + struct.pack(">H", len(text))
            peer.sendall(b"\x81" + length + b"\1\2\3\4" + bytes(byte ^ (1, 2, 3, 4)[n % 4] for n, byte in enumerate(text)))
            head = stream.read(2)
            size = head[1] if head[1] < 126 else struct.unpack(">H", stream.read(2))[0]
            assert stream.read(size) == text
        return "echoed"


def guest_first():
    with connect("raw.example.com", 7001) as peer:
        peer.sendall(b"abc")
        peer.shutdown(socket.SHUT_WR)
        return rest(peer).decode()


def server_first():
    with connect("www.example.com", 7003) as peer:
        heard = rest(peer).decode().strip()
        time.sleep(0.5)
        peer.sendall(b"the guest goes on\n")
        peer.shutdown(socket.SHUT_WR)
        return heard


def both_at_once():
    with connect("www.example.com", 7003) as peer:
        peer.sendall(b"at once\n")
        peer.shutdown(socket.SHUT_WR)
        return rest(peer).decode().strip()


def neither():
    """A reset, in place of an end."""
    with connect("raw.example.com", 7000) as peer:
        peer.sendall(b"x")
        assert peer.recv(1) == b"x"
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return "gone"


def slowly():
    """A byte of a hello now and then."""
    began = time.monotonic()
    with connect("www.example.com", 443) as peer:
        for byte in b"\x16\3\1\2\0\1\0\1\xfc\3\3" + bytes(30):
            peer.sendall(bytes([byte]))
            time.sleep(0.9)
            try:
                if peer.recv(1, socket.MSG_DONTWAIT) == b"":
                    break
            except BlockingIOError:
                pass
    return f"open for {time.monotonic() - began:.0f} s"


def host_by_vsock():
    told = []
    for port in (1, 22, 1024, 5000):
        with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) as peer:
            peer.settimeout(3)
            try:
                peer.connect((2, port))
                told.append("connected")
            except OSError as error:
                told.append(type(error).__name__)
    return " ".join(told)


def guard():
    return "private" if ipaddress.ip_address(socket.gethostbyname("www.example.com")).is_private else "global"


def broken_names():
    """Questions that no library would ask."""
    told = []
    for question in (b"\3w w\7example\3com\0", b"\xc0\x0c", b"\3www\7example\3com", b"\3w.w\7example\3com\0", b"\3ww\0\7example\3com\0"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
            peer.settimeout(5)
            peer.sendto(b"\0\1\1\0\0\1\0\0\0\0\0\0" + question + b"\0\1\0\1", ("198.18.0.1", 53))
            told.append(str(peer.recv(512)[3] & 15))
    return " ".join(told)


for name, what in {
    "pieces-of-one": lambda: pieces(1, 0),
    "records-of-five": lambda: pieces(100, 5),
    "large-hello": lambda: pieces(1460, 0, ["http/1.1"] + [f"x{n:03}" * 30 for n in range(50)], 5000),
    "ech": lambda: extended(0xFE0D),
    "esni": lambda: extended(0xFFCE),
    "any-extension": lambda: extended(0x7777),
    "websocket": lambda: websocket("ws.example.com", False),
    "websocket-tls": lambda: websocket("www.example.com", True),
    "websocket-without-rule": lambda: websocket("www.example.com", False),
    "guest-first": guest_first,
    "server-first": server_first,
    "both-at-once": both_at_once,
    "reset": neither,
    "slow-hello": slowly,
    "vsock": host_by_vsock,
    "guard": guard,
    "broken-names": broken_names,
}.items():
    try:
        told = what()
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    print(f"{name}: {told}", flush=True)
