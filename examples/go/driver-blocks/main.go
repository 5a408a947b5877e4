// Command driver-blocks lists the allocated blocks of a snapshot, or what changed since a base, on the socket of a CSI
// driver:
//
//	cd examples/go && go run ./driver-blocks SOCKET SNAPSHOT_ID [BASE_ID]
package main

import (
	"context"
	"log"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"csi-loopback/examples/go/blocks"
)

func main() {
	if len(os.Args) != 3 && len(os.Args) != 4 {
		log.Fatal("usage: driver-blocks SOCKET SNAPSHOT_ID [BASE_ID]")
	}
	conn, err := grpc.NewClient("unix:"+os.Args[1], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	client, ctx, snapshot := csi.NewSnapshotMetadataClient(conn), context.Background(), os.Args[2]
	err = blocks.Print(func(start int64) (blocks.Next[*csi.BlockMetadata], error) {
		if len(os.Args) == 3 {
			request := &csi.GetMetadataAllocatedRequest{SnapshotId: snapshot, StartingOffset: start}
			stream, err := client.GetMetadataAllocated(ctx, request)
			return func() (blocks.Message[*csi.BlockMetadata], error) { return stream.Recv() }, err
		}
		request := &csi.GetMetadataDeltaRequest{
			BaseSnapshotId: os.Args[3], TargetSnapshotId: snapshot, StartingOffset: start,
		}
		stream, err := client.GetMetadataDelta(ctx, request)
		return func() (blocks.Message[*csi.BlockMetadata], error) { return stream.Recv() }, err
	})
	if err != nil {
		log.Fatal(err)
	}
}
