// Command node-driver-registrar stands in for the released sidecar of that name, whose module cannot be downloaded. It
// registers a CSI driver with the kubelet of this machine (pluginregistration/v1) and accepts the released sidecar's flags
// that deploy/ uses.
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
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// registrar answers the requests that kubelet sends to each socket in its directory plugins_registry.
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
		// Kubelet retries by itself.
		fmt.Printf("%s is not registered: %s\n", r.name, status.Error)
	} else {
		fmt.Printf("%s is registered\n", r.name)
	}
	return &registration.RegistrationStatusResponse{}, nil
}

func main() {
	var address, name, endpoint, directory string
	flag.StringVar(&address, "csi-address", "/run/csi/socket", "socket of the driver, as this program sees it")
	flag.StringVar(&name, "driver-name", "", "name of the driver, by default the one that it reports")
	flag.StringVar(&endpoint, "kubelet-registration-path", "", "socket of the driver, as kubelet sees it")
	flag.StringVar(&directory, "plugin-registration-path", "/registration", "kubelet's directory for registration sockets")
	flag.Parse()
	fmt.Println("stand-in for the released node-driver-registrar")
	if err := run(address, name, endpoint, directory); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// driverName returns the name that the driver reports, when it answers.
func driverName(ctx context.Context, address string) (string, error) {
	connection, err := grpc.NewClient("unix:"+address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return "", err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	info, err := csi.NewIdentityClient(connection).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}, grpc.WaitForReady(true))
	return info.GetName(), err
}

// run serves until SIGTERM. The socket, and with it the registration, ends with this program.
func run(address, name, endpoint, directory string) error {
	ended, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	// A short name, since a socket's path has room for 107 bytes and tests have long ones.
	socket := filepath.Join(directory, fmt.Sprintf("%d.sock", os.Getpid()))
	if name == "" {
		var err error
		if name, err = driverName(ended, address); err != nil {
			return err
		}
		socket = filepath.Join(directory, name+"-reg.sock")
		// A registrar that was killed leaves its socket.
		if err := os.Remove(socket); err != nil && !os.IsNotExist(err) {
			return err
		}
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	registration.RegisterRegistrationServer(server, &registrar{name: name, endpoint: endpoint})
	go func() {
		<-ended.Done()
		server.Stop()
	}()
	return server.Serve(listener)
}
