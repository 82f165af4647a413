"""uvicorn's HTTP/1.1, with an end to the headers that a connection may send.

The parser collects a request's head until it is whole, however long it gets; doors.py can refuse it only then.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.doors import MAX_HEADER_BYTES, headers_too_large

MAX_HEAD_BYTES = 4 * MAX_HEADER_BYTES
"""Far enough above what doors.py refuses with its reasons: here the connection ends, too."""


class BoundedHttp(HttpToolsProtocol):
    """Ends a connection whose head does not end, and leaves out what follows a body: trailers are no headers."""

    _is_in_head = False
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """As uvicorn's; then looks at how much of a head there is."""
        was_in_head = self._is_in_head
        super().data_received(data)
        if was_in_head and self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse()

    def on_message_begin(self) -> None:
        """A request's first byte."""
        self._is_in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or a trailer."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head's end."""
        self._is_in_head = False
        super().on_headers_complete()

    def _refuse(self) -> None:
        body = headers_too_large().payload()
        lines = (
            b"HTTP/1.1 431 Request Header Fields Too Large",
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
        )
        self.transport.write(b"\r\n".join([*lines, b"", body]))
        self.transport.close()
