"""A name server at 127.0.0.1 that knows the addresses of some names, and never answers what has which address.

    python name_server.py QUESTIONS NAME=ADDRESS ...

Prints a line once it listens, and appends each question that it does not answer to the file QUESTIONS.
"""

import socket
import struct
import sys
from pathlib import Path

_A = 1


def question_of(message):
    """The name, the type and the end of the question of a message (RFC 1035, section 4.1.2)."""
    labels, at = [], 12
    while size := message[at]:
        labels.append(message[at + 1 : at + 1 + size].decode())
        at += 1 + size
    kind, _ = struct.unpack_from("!HH", message, at + 1)
    return ".".join(labels), kind, at + 5


def answer(message, addresses):
    """The answer to a question; None if none is given."""
    name, kind, end = question_of(message)
    if name not in addresses:
        return None
    found = [addresses[name]] if kind == _A else []
    records = [struct.pack("!HHHIH4s", 0xC00C, _A, 1, 60, 4, socket.inet_aton(address)) for address in found]
    return message[:2] + struct.pack("!HHHHH", 0x8180, 1, len(records), 0, 0) + message[12:end] + b"".join(records)


def main(questions, *known):
    addresses = dict(one.split("=") for one in known)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 53))
        print("listens", flush=True)
        while True:
            message, sender = server.recvfrom(1024)
            if (found := answer(message, addresses)) is not None:
                server.sendto(found, sender)
            else:
                with Path(questions).open("a") as file:
                    file.write(f"{question_of(message)[0]}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
