// Command node-driver-registrar registers a CSI driver with kubelet, like the released sidecar of that name, which is
// not available as a Go module. Both implement kubelet's pluginregistration/v1 API.
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// registrar implements the service that kubelet calls on each socket in its directory plugins_registry.
type registrar struct {
	registration.UnimplementedRegistrationServer
	name, endpoint string
}

func (r *registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{
		Type:              registration.CSIPlugin,
		Name:              r.name,
		Endpoint:          r.endpoint,
		SupportedVersions: []string{"1.0.0"},
	}, nil
}

func (r *registrar) NotifyRegistrationStatus(
	_ context.Context, status *registration.RegistrationStatus,
) (*registration.RegistrationStatusResponse, error) {
	if !status.PluginRegistered {
		// Kubelet retries.
		fmt.Printf("%s is not registered: %s\n", r.name, status.Error)
	} else {
		fmt.Printf("%s is registered\n", r.name)
	}
	return &registration.RegistrationStatusResponse{}, nil
}

func main() {
	var name, endpoint, directory string
	flag.StringVar(&name, "driver-name", "", "name of the driver")
	flag.StringVar(&endpoint, "kubelet-registration-path", "", "path of the driver's socket in kubelet's mount namespace")
	flag.StringVar(&directory, "plugin-registration-path", "/registration", "kubelet's directory of registration sockets")
	flag.Parse()
	if err := run(name, endpoint, directory); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// run serves until SIGTERM. The removal of the socket ends the registration.
func run(name, endpoint, directory string) error {
	// Short, because the path of a unix socket has at most 107 bytes.
	socket := filepath.Join(directory, fmt.Sprintf("%d.sock", os.Getpid()))
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	registration.RegisterRegistrationServer(server, &registrar{name: name, endpoint: endpoint})
	ended, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	go func() {
		<-ended.Done()
		server.Stop()
	}()
	return server.Serve(listener)
}
