// Command snapshot-metadata-lister prints what a VolumeSnapshot holds, or what changed between two, as the
// released command of that name does.
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
		return fmt.Errorf("-o %s: it is table or json", format)
	}
}
