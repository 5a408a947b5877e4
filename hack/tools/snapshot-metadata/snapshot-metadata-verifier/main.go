// Command snapshot-metadata-verifier copies the allocated blocks of a VolumeSnapshot, or the changed blocks since an
// earlier one, from one device to another. It fails if the devices then differ, like the released command of that name.
package main

import (
	"errors"
	"flag"
	"os"

	"csi-loopback/hack/tools/snapshot-metadata/arguments"

	"github.com/kubernetes-csi/external-snapshot-metadata/pkg/iterator"
)

func main() {
	var common arguments.Common
	var source, target string
	common.Register(flag.CommandLine)
	arguments.Text(flag.CommandLine, &source, "source-device-path", "src", "",
		"device with the snapshot's content")
	arguments.Text(flag.CommandLine, &target, "target-device-path", "tgt", "",
		"device with the earlier snapshot's content, or with zeros; the command writes to it")
	flag.Parse()
	arguments.Exit(verify(&common, source, target))
}

func verify(common *arguments.Common, source, target string) error {
	if source == "" || target == "" {
		return errors.New("the flags -src and -tgt are required")
	}
	from, err := os.Open(source)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := os.OpenFile(target, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer to.Close()
	return common.Run(&iterator.VerifierEmitter{SourceDevice: from, TargetDevice: to})
}
