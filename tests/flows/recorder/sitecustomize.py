"""Imported by each Python that has this folder in its path: records which hosts its process asks for or connects to."""

import os
import sys

EVENTS = {"socket.getaddrinfo", "socket.gethostbyname", "socket.connect", "socket.sendto"}


def record(event: str, arguments: tuple) -> None:
    if event in EVENTS:
        address = arguments[1] if event in ("socket.connect", "socket.sendto") else arguments[0]
        if isinstance(address, tuple):
            address = address[0]
        elif event == "socket.connect":
            return  # a Unix socket
        text = address.decode() if isinstance(address, bytes) else str(address)
        file = os.open(os.environ["RECORDED_ADDRESSES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{text}\n".encode())
        os.close(file)


if "RECORDED_ADDRESSES" in os.environ:
    sys.addaudithook(record)
