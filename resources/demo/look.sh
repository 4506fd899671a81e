#!/bin/sh
# What the job's machine looks like from inside, one fact a line: name, tab, value. For the page that the demo prints.
fact() { printf '%s\t%s\n' "$1" "$2"; }
fact kernel "$(uname -r)"
fact host "$(uname -n)"
fact user "$(id -un)"
fact processes "$(find /proc -maxdepth 1 -name '[0-9]*' | wc -l)"
fact memory "$(awk '/^MemTotal:/ { printf "%d MiB", $2 / 1024 }' /proc/meminfo)"
fact cpus "$(grep -c '^processor' /proc/cpuinfo)"
fact interfaces "$(awk -F: 'NR > 2 { printf "%s ", $1 }' /proc/net/dev)"
fact disk "$(df -h / | awk 'NR == 2 { print $2 }')"
python3 - <<'END'
import socket

def tries(what):
    try:
        what()
    except OSError as error:
        return error.strerror or str(error)
    return "succeeded"

address = socket.socket()
address.settimeout(5)
print("address", tries(lambda: address.connect(("192.0.2.1", 443))), sep="\t")
print("name", tries(lambda: socket.getaddrinfo("example.com", 443)), sep="\t")
END
