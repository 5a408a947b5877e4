"""Lists the allocated blocks of a snapshot, or what changed since a base, on the socket of a CSI
driver:

    pip install grpcio grpcio-tools
    python examples/python/driver.py SOCKET SNAPSHOT_ID [BASE_ID]
"""

import sys
from pathlib import Path

import grpc

from blocks import extents

# Compiles the protocol at the import. For a product, generate code with grpc_tools.protoc.
sys.path.append(str(Path(__file__).resolve().parents[2] / "src/grpc/csi-spec"))
csi, services = grpc.protos_and_services("csi.proto")


def main(socket, snapshot, base=None):
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        metadata = services.SnapshotMetadataStub(channel)

        def call(start):
            if base is None:
                return metadata.GetMetadataAllocated(csi.GetMetadataAllocatedRequest(
                    snapshot_id=snapshot, starting_offset=start))
            return metadata.GetMetadataDelta(csi.GetMetadataDeltaRequest(
                base_snapshot_id=base, target_snapshot_id=snapshot, starting_offset=start))

        for offset, length in extents(call):
            print(offset, length)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except grpc.RpcError as error:
        sys.exit(f"{error.code().name}: {error.details()}")
