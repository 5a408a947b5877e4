// Package arguments has the shared parts of the commands of this module: the flags of the released
// snapshot-metadata-lister and snapshot-metadata-verifier, and the connection to the API server.
//
// The released commands are untagged Go modules below examples/, which no module proxy serves. Like them, these
// commands use the released library pkg/iterator, so that a server sees the same client.
package arguments

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/kubernetes-csi/external-snapshot-metadata/pkg/iterator"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Common has the flags of every command. Register declares them, Run executes the request.
type Common struct {
	request    iterator.Args
	maxResults int
	kubeconfig string
}

// Text declares a flag under its long and its short name.
func Text(flags *flag.FlagSet, value *string, long, short, byDefault, usage string) {
	flags.StringVar(value, long, byDefault, usage)
	flags.StringVar(value, short, byDefault, "short for -"+long)
}

// Register declares the flags that all commands have.
func (c *Common) Register(flags *flag.FlagSet) {
	r := &c.request
	Text(flags, &r.Namespace, "namespace", "n", "", "namespace of the VolumeSnapshots")
	Text(flags, &r.SnapshotName, "snapshot", "s", "", "name of the VolumeSnapshot")
	Text(flags, &r.PrevSnapshotName, "previous-snapshot", "p", "",
		"name of the base VolumeSnapshot, to get changed blocks")
	Text(flags, &r.PrevSnapshotID, "previous-snapshot-id", "P", "",
		"CSI handle of the base; overrides its name")
	flags.StringVar(&c.kubeconfig, "kubeconfig", defaultKubeconfig(),
		"path of a kubeconfig; if the file is missing, the pod's ServiceAccount")
	flags.Int64Var(&r.StartingOffset, "starting-offset", 0, "first byte of the result")
	flags.IntVar(&c.maxResults, "max-results", 0, "maximum number of extents per message; 0: the driver's default")
	flags.StringVar(&r.SAName, "service-account", "",
		"ServiceAccount of the token (default: the caller's)")
	flags.StringVar(&r.SANamespace, "service-account-namespace", "", "namespace of the ServiceAccount")
	flags.Int64Var(&r.TokenExpirySecs, "token-expiry", iterator.DefaultTokenExpirySeconds,
		"lifetime of the token in seconds")
}

func defaultKubeconfig() string {
	home, err := os.UserHomeDir()
	if err != nil {
		return ""
	}
	return filepath.Join(home, ".kube", "config")
}

// Run requests the metadata and passes the responses to the emitter.
func (c *Common) Run(emitter iterator.IteratorEmitter) error {
	config, err := c.config()
	if err != nil {
		return fmt.Errorf("kubeconfig %q: %w", c.kubeconfig, err)
	}
	c.request.Clients, err = iterator.BuildClients(config)
	if err != nil {
		return err
	}
	c.request.Emitter = emitter
	c.request.MaxResults = int32(c.maxResults)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return iterator.GetSnapshotMetadata(ctx, c.request)
}

func (c *Common) config() (*rest.Config, error) {
	if _, err := os.Stat(c.kubeconfig); errors.Is(err, os.ErrNotExist) {
		return rest.InClusterConfig()
	}
	return clientcmd.BuildConfigFromFlags("", c.kubeconfig)
}

// Exit ends the command. After an error it prints the error to stderr and exits with 1.
func Exit(err error) {
	if err != nil {
		fmt.Fprintf(os.Stderr, "Error: %v\n", err)
		os.Exit(1)
	}
	os.Exit(0)
}
