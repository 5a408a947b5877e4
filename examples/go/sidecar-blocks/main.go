// Command sidecar-blocks lists the allocated blocks of a VolumeSnapshot, or what changed since a base, through the
// sidecar of a CSI driver:
//
//	cd examples/go && go run ./sidecar-blocks ADDRESS CA_FILE TOKEN_FILE NAMESPACE NAME [BASE_HANDLE]
//
// ADDRESS and CA are in the driver's SnapshotMetadataService. BASE_HANDLE is the base's CSI handle.
package main

import (
	"context"
	"log"
	"os"
	"strings"

	"github.com/kubernetes-csi/external-snapshot-metadata/pkg/api"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"csi-loopback/examples/go/blocks"
)

func main() {
	if len(os.Args) != 6 && len(os.Args) != 7 {
		log.Fatal("usage: sidecar-blocks ADDRESS CA_FILE TOKEN_FILE NAMESPACE NAME [BASE_HANDLE]")
	}
	trust, err := credentials.NewClientTLSFromFile(os.Args[2], "")
	if err != nil {
		log.Fatal(err)
	}
	conn, err := grpc.NewClient(os.Args[1], grpc.WithTransportCredentials(trust))
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	client, ctx, namespace, name := api.NewSnapshotMetadataClient(conn), context.Background(), os.Args[4], os.Args[5]
	err = blocks.Print(func(start int64) (blocks.Next[*api.BlockMetadata], error) {
		text, err := os.ReadFile(os.Args[3]) // Again for each call: tokens are replaced.
		token := strings.TrimSpace(string(text))
		if err != nil {
			return nil, err
		}
		if len(os.Args) == 6 {
			stream, err := client.GetMetadataAllocated(ctx, &api.GetMetadataAllocatedRequest{
				SecurityToken: token, Namespace: namespace, SnapshotName: name, StartingOffset: start})
			return func() (blocks.Message[*api.BlockMetadata], error) { return stream.Recv() }, err
		}
		stream, err := client.GetMetadataDelta(ctx, &api.GetMetadataDeltaRequest{
			SecurityToken: token, Namespace: namespace, TargetSnapshotName: name, BaseSnapshotId: os.Args[6], StartingOffset: start})
		return func() (blocks.Message[*api.BlockMetadata], error) { return stream.Recv() }, err
	})
	if err != nil {
		log.Fatal(err)
	}
}
