// Package storage runs the specs "External Storage" of Kubernetes' test/e2e, and nothing else of it, so that fewer packages
// are compiled. Its main program does what test/e2e/e2e_test.go does.
package storage

import (
	"context"
	"flag"
	"os"
	"testing"

	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/gomega"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/kubernetes/test/e2e/framework"
	"k8s.io/kubernetes/test/e2e/framework/config"
	_ "k8s.io/kubernetes/test/e2e/framework/debug/init"
	_ "k8s.io/kubernetes/test/e2e/framework/metrics/init"
	_ "k8s.io/kubernetes/test/e2e/framework/node/init"
	"k8s.io/kubernetes/test/e2e/framework/testfiles"
	_ "k8s.io/kubernetes/test/e2e/storage/external"
	storageframework "k8s.io/kubernetes/test/e2e/storage/framework"
	"k8s.io/kubernetes/test/e2e/storage/testsuites"
	e2etestingmanifests "k8s.io/kubernetes/test/e2e/testing-manifests"
	_ "k8s.io/kubernetes/test/utils/ktesting/format"
)

// suite is a suite of the specs, whose driver it replaces by another one.
type suite struct{ storageframework.TestSuite }

func (s suite) DefineTests(driver storageframework.TestDriver, pattern storageframework.TestPattern) {
	s.TestSuite.DefineTests(adaptedDriver{driver.(externalDriver), s.GetTestSuiteInfo().Name}, pattern)
}

// externalDriver is what a driver definition implements.
type externalDriver interface {
	storageframework.CustomTimeoutsTestDriver
	storageframework.DynamicPVTestDriver
	storageframework.EphemeralTestDriver
	storageframework.SnapshottableTestDriver
	storageframework.VolumeAttributesClassTestDriver
	storageframework.VolumeGroupSnapshottableTestDriver
}

// adaptedDriver is a driver definition that serves all suites.
type adaptedDriver struct {
	externalDriver
	suite string
}

// PrepareTest adds the driver's namespace, without which the specs of snapshot metadata crash. They create a
// SnapshotMetadataService there for a driver that they install themselves. Their client reads the one with the name of the
// snapshot's driver, which the driver's own sidecar publishes.
func (d adaptedDriver) PrepareTest(ctx context.Context, f *framework.Framework) *storageframework.PerTestConfig {
	prepared := d.externalDriver.PrepareTest(ctx, f)
	prepared.DriverNamespace = f.Namespace
	return prepared
}

// GetDynamicProvisionStorageClass binds claims at once for the suites that use claims without pods.
func (d adaptedDriver) GetDynamicProvisionStorageClass(ctx context.Context, prepared *storageframework.PerTestConfig, fsType string) *storagev1.StorageClass {
	class := d.externalDriver.GetDynamicProvisionStorageClass(ctx, prepared, fsType)
	switch d.suite {
	case "pvc-deletion-performance", "volume-lifecycle-performance", "volume-modify-stress":
		class.VolumeBindingMode = new(storagev1.VolumeBindingImmediate)
	}
	return class
}

// GetVolumeGroupSnapshotClass removes the deletion policy from the parameters of the driver, which refuses it as unknown. The
// specs pass it there in addition to its field.
func (d adaptedDriver) GetVolumeGroupSnapshotClass(ctx context.Context, prepared *storageframework.PerTestConfig, parameters map[string]string) *unstructured.Unstructured {
	class := d.externalDriver.GetVolumeGroupSnapshotClass(ctx, prepared, parameters)
	delete(class.Object["parameters"].(map[string]string), "deletionPolicy")
	return class
}

func init() {
	for i, initialize := range testsuites.CSISuites {
		testsuites.CSISuites[i] = func() storageframework.TestSuite { return suite{initialize()} }
	}
}

func TestMain(m *testing.M) {
	config.CopyFlags(config.Flags, flag.CommandLine)
	framework.RegisterCommonFlags(flag.CommandLine)
	framework.RegisterClusterFlags(flag.CommandLine)
	flag.Parse()
	testfiles.AddFileSource(e2etestingmanifests.GetE2ETestingManifestsFS())
	framework.AfterReadingAllFlags(&framework.TestContext)
	os.Exit(m.Run())
}

func TestStorage(t *testing.T) {
	gomega.RegisterFailHandler(framework.Fail)
	ginkgo.RunSpecs(t, "Kubernetes")
}
