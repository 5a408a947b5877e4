// Command snapshot-metadata-lister prints the allocated blocks of a VolumeSnapshot, or the changed blocks between two,
// like the released command of that name.
package main

import (
	"flag"
	"fmt"
	"os"

	"csi-loopback/hack/tools/snapshot-metadata/arguments"

	"github.com/kubernetes-csi/external-snapshot-metadata/pkg/iterator"
)

func main() {
	var common arguments.Common
	var format string
	common.Register(flag.CommandLine)
	arguments.Text(flag.CommandLine, &format, "output-format", "o", "table", "table or json")
	flag.Parse()
	arguments.Exit(list(&common, format))
}

func list(common *arguments.Common, format string) error {
	switch format {
	case "table":
		return common.Run(&iterator.TableEmitter{Writer: os.Stdout})
	case "json":
		return common.Run(&iterator.JSONEmitter{Writer: os.Stdout})
	default:
		return fmt.Errorf("-o %s: use table or json", format)
	}
}
