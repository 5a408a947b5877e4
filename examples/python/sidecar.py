"""Lists the allocated blocks of a VolumeSnapshot, or what changed since a base, through the sidecar
of a CSI driver:

    pip install grpcio grpcio-tools
    python examples/python/sidecar.py ADDRESS CA_FILE TOKEN_FILE NAMESPACE NAME [BASE_HANDLE]

ADDRESS and CA are in the driver's SnapshotMetadataService. BASE_HANDLE is the base's CSI handle.
"""

import sys
from pathlib import Path

import grpc

from blocks import extents

# Compiles the protocol at the import. For a product, generate code with grpc_tools.protoc.
sys.path.append(str(Path(__file__).resolve().parents[2] / "src/grpc/csi-spec"))
api, services = grpc.protos_and_services("snapshotmetadata.proto")


def main(address, ca_file, token_file, namespace, name, base=None):
    trust = grpc.ssl_channel_credentials(Path(ca_file).read_bytes())
    with grpc.secure_channel(address, trust) as channel:
        metadata = services.SnapshotMetadataStub(channel)

        def call(start):
            # Read again for each call: tokens are replaced.
            common = dict(security_token=Path(token_file).read_text().strip(),
                          namespace=namespace, starting_offset=start)
            if base is None:
                return metadata.GetMetadataAllocated(
                    api.GetMetadataAllocatedRequest(snapshot_name=name, **common))
            return metadata.GetMetadataDelta(api.GetMetadataDeltaRequest(
                base_snapshot_id=base, target_snapshot_name=name, **common))

        for offset, length in extents(call):
            print(offset, length)


if __name__ == "__main__":
    if len(sys.argv) not in (6, 7):
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except grpc.RpcError as error:
        sys.exit(f"{error.code().name}: {error.details()}")
