"""The notification protocol of systemd (sd_notify(3)): datagrams to the socket in NOTIFY_SOCKET."""

from __future__ import annotations

import os
import socket


class Notifier:
    """Tells the service manager how this process stands; without one every call does nothing."""

    def __init__(self, address: str | None = None) -> None:
        path = os.environ.get("NOTIFY_SOCKET", "") if address is None else address
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) if path else None
        if self._socket is not None:
            self._socket.setblocking(False)

    @property
    def watchdog_s(self) -> float | None:
        """How often WATCHDOG=1 is due, in seconds: half of WATCHDOG_USEC, as sd_watchdog_enabled(3) advises."""
        micros = os.environ.get("WATCHDOG_USEC", "")
        mine = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        return int(micros) / 2e6 if micros.isdigit() and int(micros) > 0 and mine and self._socket else None

    def status(self, text: str, extend_s: float | None = None) -> None:
        """One line for ``systemctl status``; ``extend_s`` asks for that many more seconds to start or stop."""
        extend = f"\nEXTEND_TIMEOUT_USEC={int(extend_s * 1e6)}" if extend_s else ""
        self._send(f"STATUS={text}{extend}")

    def ready(self, text: str) -> None:
        """The service serves."""
        self._send(f"READY=1\nSTATUS={text}")

    def watchdog(self) -> None:
        """The service is alive and getting on."""
        self._send("WATCHDOG=1")

    def stopping(self, text: str) -> None:
        """The service drains."""
        self._send(f"STOPPING=1\nSTATUS={text}")

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, state: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto(state.encode(), self._address)
        except OSError:  # a manager that is gone or slow must not stop the service
            return
