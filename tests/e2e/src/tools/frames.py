"""In the guest, with nothing else going on: frames that no honest program sends, and how many frames come back.

Prints a line for each kind. A plain SYN to an allowed name is the control: what is hidden in the others is the same SYN.
"""
import socket, struct, time

GUEST, GATEWAY = "198.18.0.2", "198.18.0.1"
link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
link.bind(("eth0", 0))
link.setblocking(False)
mac = link.getsockname()[4]
site = socket.gethostbyname("www.example.com")
socket.create_connection((site, 443)).close()
for line in open("/proc/net/arp"):
    if line.startswith(GATEWAY + " "):
        gateway = bytes.fromhex(line.split()[3].replace(":", ""))
ports = iter(range(20000, 30000))


def checksum(data):
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def pseudo(source, destination, protocol, body):
    return socket.inet_aton(source) + socket.inet_aton(destination) + struct.pack(">BBH", 0, protocol, len(body))


def tcp(source=GUEST, destination=site, port=443):
    head = struct.pack(">HHIIBBHHH", next(ports), port, 1, 0, 0x50, 2, 65535, 0, 0)
    return head[:16] + struct.pack(">H", checksum(pseudo(source, destination, 6, head) + head)) + head[18:]


def udp(destination, port, data, source=GUEST, own=5000):
    body = struct.pack(">HHHH", own, port, len(data) + 8, 0) + data
    return body[:6] + struct.pack(">H", checksum(pseudo(source, destination, 17, body) + body)) + body[8:]


def icmp(kind, code=0, body=b"\0\1\0\1data"):
    head = bytes([kind, code, 0, 0]) + body
    return head[:2] + struct.pack(">H", checksum(head)) + head[4:]


def ip(body, protocol=6, source=GUEST, destination=site, options=b"", fragment=0x4000):
    head = struct.pack(">BBHHHBBH4s4s", 0x45 + len(options) // 4, 0, 20 + len(options) + len(body), 1, fragment, 64, protocol, 0,
                       socket.inet_aton(source), socket.inet_aton(destination)) + options
    return head[:10] + struct.pack(">H", checksum(head)) + head[12:] + body


def ethernet(body, kind=b"\x08\0", source=mac, destination=gateway):
    return destination + source + kind + body


def arp(operation, sender, target, destination=b"\xff" * 6):
    body = struct.pack(">HHBBH", 1, 0x800, 6, 4, operation) + mac + socket.inet_aton(sender) + b"\0" * 6 + socket.inet_aton(target)
    return ethernet(body, b"\x08\x06", destination=destination)


def dhcp():
    body = bytes([2, 1, 6, 0]) + b"\1\2\3\4" + b"\0" * 8 + socket.inet_aton("10.9.9.9") + b"\0" * 8 + mac + b"\0" * 202
    return body + bytes([99, 130, 83, 99, 53, 1, 2, 54, 4]) + socket.inet_aton(GUEST) + b"\xff"


question = b"\0\1\1\0\0\1\0\0\0\0\0\0\3www\7example\3com\0\0\1\0\1"
syn = ip(tcp())
multicast = lambda last: bytes([1, 0, 0x5E, *last])
KINDS = {
    "control": [ethernet(ip(tcp()))],
    "ethertypes": [ethernet(syn, kind) for kind in (b"\x88\xcc", b"\x88\x8e", b"\x88\xf7", b"\x88\xb5", b"\x88\x63", b"\x08\x42")],
    "vlan": [ethernet(tag + syn, kind) for kind, tag in ((b"\x81\0", b"\0\5\x08\0"), (b"\x88\xa8", b"\0\5\x81\0\0\6\x08\0"))],
    "llc": [ethernet(b"\xaa\xaa\3\0\0\0\x08\0" + syn, struct.pack(">H", len(syn) + 8))],
    "other-mac": [ethernet(syn, source=b"\2\0\0\0\0\x77")],
    "ipv6": [
        ethernet(struct.pack(">IHBB", 0x60000000, 8, 58, 255) + b"\xfe\x80" + b"\0" * 13 + b"\1" + b"\xff\2" + b"\0" * 13 + b"\2"
                 + b"\x85\0\0\0\0\0\0\0", b"\x86\xdd", destination=destination)
        for destination in (gateway, b"\x33\x33\0\0\0\2")
    ],
    "fragments": [ethernet(ip(tcp(), fragment=0x2000)), ethernet(ip(udp(GATEWAY, 53, question), 17, destination=GATEWAY, fragment=0x2000)),
                  ethernet(ip(tcp(), fragment=1))],
    "options": [ethernet(ip(tcp(), options=options)) for options in (b"\x83\7\4\5\6\7\x08\0", b"\x07\4\4\0", b"\x94\4\0\0")],
    "protocols": [ethernet(ip(tcp(), protocol)) for protocol in (2, 4, 41, 47, 50, 51, 132, 136, 255)],
    "other-source": [ethernet(ip(tcp(source), source=source)) for source in ("198.18.0.3", "10.0.0.1", "127.0.0.1", site)],
    "special": [ethernet(ip(tcp(destination=to), destination=to)) for to in ("127.0.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255", "240.0.0.1")],
    "arp-others": [arp(1, GUEST, target) for target in ("198.18.0.3", "10.0.0.5", "169.254.169.254")],
    "arp-claims": [arp(1, GATEWAY, GATEWAY), arp(2, GATEWAY, GUEST), arp(2, GATEWAY, GUEST, gateway)],
    "dhcp-server": [ethernet(ip(udp("255.255.255.255", 68, dhcp(), own=67), 17, destination="255.255.255.255"), destination=b"\xff" * 6)],
    "icmp": [ethernet(ip(icmp(kind, 1, syn[:28]), 1, destination=GATEWAY)) for kind in (3, 5, 9, 10, 13, 17)]
            + [ethernet(ip(icmp(8), 1, destination="8.8.8.8")), ethernet(ip(icmp(8, 0, b"\0" * 1400), 1, destination=GATEWAY))],
    "multicast": [ethernet(ip(udp(group, port, question), 17, destination=group), destination=multicast(last))
                  for group, port, last in (("224.0.0.251", 5353, (0, 0, 251)), ("239.255.255.250", 1900, (0x7F, 0xFF, 0xFA)), ("224.0.0.252", 5355, (0, 0, 252)))]
                 + [ethernet(ip(udp("255.255.255.255", 137, question), 17, destination="255.255.255.255"), destination=b"\xff" * 6)],
}


def drain(seconds):
    count, end = 0, time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        try:
            _, (_, _, direction, *_) = link.recvfrom(65536)
            # What this machine sent itself passes by here, too.
            count += direction != 4
        except BlockingIOError:
            time.sleep(min(left, 0.02))
    return count


drain(1)
for name, frames in KINDS.items():
    for frame in frames:
        link.send(frame.ljust(60, b"\0"))
    print(name, "answered" if drain(0.4) else "silence", flush=True)
