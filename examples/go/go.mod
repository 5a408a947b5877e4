module csi-loopback/examples/go

go 1.26.0

tool (
	csi-loopback/examples/go/driver-blocks
	csi-loopback/examples/go/sidecar-blocks
)

require (
	github.com/container-storage-interface/spec v1.13.0
	github.com/kubernetes-csi/external-snapshot-metadata v1.1.0
	google.golang.org/grpc v1.84.0
)

require (
	golang.org/x/net v0.57.0 // indirect
	golang.org/x/sys v0.47.0 // indirect
	golang.org/x/text v0.40.0 // indirect
	google.golang.org/genproto/googleapis/rpc v0.0.0-20260706201446-f0a921348800 // indirect
	google.golang.org/protobuf v1.36.12-0.20260120151049-f2248ac996af // indirect
)
