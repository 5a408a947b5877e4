// Package arguments is what the commands of this module have in common: the flags of the released
// snapshot-metadata-lister and snapshot-metadata-verifier, and how they come to the API server.
//
// The released commands are Go modules of their own below examples/ and have no tags, so no module
// proxy serves them. All that they do is in the released library pkg/iterator, which these use; to a
// server they are the same client.
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

// Common is what every command is told. Register declares its flags, Run does the work.
type Common struct {
	request    iterator.Args
	maxResults int
	kubeconfig string
}

// Text declares a flag under its long and its short name.
func Text(flags *flag.FlagSet, value *string, long, short, otherwise, meaning string) {
	flags.StringVar(value, long, otherwise, meaning)
	flags.StringVar(value, short, otherwise, "short for -"+long)
}

// Register declares the flags that all commands have.
func (c *Common) Register(flags *flag.FlagSet) {
	r := &c.request
	Text(flags, &r.Namespace, "namespace", "n", "", "namespace of the VolumeSnapshots")
	Text(flags, &r.SnapshotName, "snapshot", "s", "", "the VolumeSnapshot asked about")
	Text(flags, &r.PrevSnapshotName, "previous-snapshot", "p", "",
		"an earlier VolumeSnapshot: what changed since is asked for")
	Text(flags, &r.PrevSnapshotID, "previous-snapshot-id", "P", "",
		"the same by its CSI handle; wins over the name")
	flags.StringVar(&c.kubeconfig, "kubeconfig", defaultKubeconfig(),
		"where the API server is; where there is no such file, the pod's own")
	flags.Int64Var(&r.StartingOffset, "starting-offset", 0, "first byte asked about")
	flags.IntVar(&c.maxResults, "max-results", 0, "extents in a message at most; 0: the driver decides")
	flags.StringVar(&r.SAName, "service-account", "",
		"ServiceAccount that the token is for; without it the caller's own")
	flags.StringVar(&r.SANamespace, "service-account-namespace", "", "its namespace")
	flags.Int64Var(&r.TokenExpirySecs, "token-expiry", iterator.DefaultTokenExpirySeconds,
		"seconds that the token is good for")
}

func defaultKubeconfig() string {
	home, err := os.UserHomeDir()
	if err != nil {
		return ""
	}
	return filepath.Join(home, ".kube", "config")
}

// Run asks for the metadata and gives what comes to the emitter.
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

// Exit ends the command: with 1 and a line on stderr if there was an error.
func Exit(err error) {
	if err != nil {
		fmt.Fprintf(os.Stderr, "Error: %v\n", err)
		os.Exit(1)
	}
	os.Exit(0)
}
