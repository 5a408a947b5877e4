// Command livenessprobe stands in for the released sidecar of that name, whose module cannot be downloaded. It answers
// /healthz with 200 while the driver's Probe succeeds, and accepts the released sidecar's flags that deploy/ uses.
package main

import (
	"context"
	"flag"
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

func main() {
	address := flag.String("csi-address", "/run/csi/socket", "the driver's socket")
	port := flag.Int("health-port", 9808, "TCP port of /healthz")
	timeout := flag.Duration("probe-timeout", time.Second, "maximum duration of a probe")
	flag.Parse()
	fmt.Println("stand-in for the released livenessprobe")
	if err := run(*address, *port, *timeout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(address string, port int, timeout time.Duration) error {
	connection, err := grpc.NewClient("unix:"+address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	identity := csi.NewIdentityClient(connection)
	http.HandleFunc("/healthz", func(writer http.ResponseWriter, request *http.Request) {
		ctx, cancel := context.WithTimeout(request.Context(), timeout)
		defer cancel()
		answer, err := identity.Probe(ctx, &csi.ProbeRequest{})
		if err != nil {
			http.Error(writer, err.Error(), http.StatusInternalServerError)
			return
		}
		if ready := answer.GetReady(); ready != nil && !ready.GetValue() {
			http.Error(writer, "the driver is not ready", http.StatusInternalServerError)
		}
	})
	server := &http.Server{Addr: fmt.Sprintf(":%d", port), ReadHeaderTimeout: timeout}
	return server.ListenAndServe()
}
