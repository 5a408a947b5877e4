"""Reads a stream of block extents to its end, and continues it after an interruption."""

import time

import grpc

# The next call may succeed. Every other code needs a decision (docs/guide/backup.md).
RESUMABLE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


def extents(call, attempts=5):
    """Yields offset and length in bytes. call(start) begins a response at this byte."""
    start = 0
    while True:
        try:
            for message in call(start):
                for extent in message.block_metadata:
                    end = extent.byte_offset + extent.size_bytes
                    if end > start:  # A continued stream may repeat what was read.
                        begin = max(extent.byte_offset, start)
                        yield begin, end - begin
                        start = end
            return  # Only a stream that ends without an error is complete.
        except grpc.RpcError as error:
            attempts -= 1
            if error.code() not in RESUMABLE or attempts == 0:
                raise
            time.sleep(1)
