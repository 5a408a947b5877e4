package sanity

import (
	"context"
	"io"
	"math"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

// Ten requirements of the SnapshotMetadata service in CSI v1.13. The ids in brackets are those of
// csi-loopback's `conformance`, which has more rules, and judges the data, too.

// extents is what the specs write: single blocks, which no driver joins.
const (
	extents    = 8
	extentSize = 4096
	extentStep = 1 << 20
)

// metadataMessage has the fields of both responses.
type metadataMessage interface {
	GetBlockMetadataType() csi.BlockMetadataType
	GetVolumeCapacityBytes() int64
	GetBlockMetadata() []*csi.BlockMetadata
}

// metadataStream reads all messages of a call. io.EOF is no error.
func metadataStream[M metadataMessage](stream interface{ Recv() (M, error) }, err error) ([]metadataMessage, error) {
	var all []metadataMessage
	for err == nil {
		var message M
		if message, err = stream.Recv(); err == nil {
			all = append(all, message)
		}
	}
	if err == io.EOF {
		err = nil
	}
	return all, err
}

func tuples(messages []metadataMessage) []*csi.BlockMetadata {
	var all []*csi.BlockMetadata
	for _, message := range messages {
		all = append(all, message.GetBlockMetadata()...)
	}
	return all
}

var _ = DescribeSanity("SnapshotMetadata Service", func(sc *TestContext) {
	var (
		r            *Resources
		c            csi.SnapshotMetadataClient
		base, target string
	)

	secrets := func() map[string]string {
		if sc.Secrets == nil {
			return nil
		}
		// In Kubernetes the secrets of metadata are those of the snapshot.
		return sc.Secrets.CreateSnapshotSecret
	}

	allocated := func(snapshot string, offset int64, maxResults int32) ([]metadataMessage, error) {
		return metadataStream(c.GetMetadataAllocated(context.Background(), &csi.GetMetadataAllocatedRequest{
			SnapshotId: snapshot, StartingOffset: offset, MaxResults: maxResults, Secrets: secrets(),
		}))
	}

	delta := func(base, target string, offset int64, maxResults int32) ([]metadataMessage, error) {
		return metadataStream(c.GetMetadataDelta(context.Background(), &csi.GetMetadataDeltaRequest{
			BaseSnapshotId: base, TargetSnapshotId: target, StartingOffset: offset, MaxResults: maxResults, Secrets: secrets(),
		}))
	}

	// skipWithoutDelta skips if the driver has no changes of the volume, or lacks the call, which another spec judges.
	skipWithoutDelta := func(err error) {
		GinkgoHelper()
		if code := status.Code(err); code == codes.FailedPrecondition || code == codes.Unimplemented {
			Skip("the driver has no changes of this volume: " + err.Error())
		}
	}

	// each judges complete streams of both calls.
	each := func(offset int64, maxResults int32, judge func([]metadataMessage)) {
		GinkgoHelper()
		messages, err := allocated(target, offset, maxResults)
		Expect(err).NotTo(HaveOccurred(), "GetMetadataAllocated")
		judge(messages)
		messages, err = delta(base, target, offset, maxResults)
		skipWithoutDelta(err)
		Expect(err).NotTo(HaveOccurred(), "GetMetadataDelta")
		judge(messages)
	}

	refused := func(code codes.Code, calls ...error) {
		GinkgoHelper()
		for _, err := range calls {
			skipWithoutDelta(err)
			Expect(status.Code(err)).To(Equal(code), "%v", err)
		}
	}

	snapshot := func(name, volume string) string {
		GinkgoHelper()
		req := MakeCreateSnapshotReq(sc, UniqueString("sanity-metadata-"+name), volume)
		return r.MustCreateSnapshot(context.Background(), req).GetSnapshot().GetSnapshotId()
	}

	// write publishes the volume, and writes blocks or a file.
	write := func(vol *csi.Volume) {
		GinkgoHelper()
		ctx := context.Background()
		capability := TestVolumeCapabilityWithAccessType(sc, csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)
		if isControllerCapabilitySupported(r, csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME) {
			Skip("writing to a volume that needs ControllerPublishVolume is not supported here")
		}
		staging := ""
		if isNodeCapabilitySupported(r, csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME) {
			staging = sc.StagingPath
			_, err := r.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
				VolumeId: vol.GetVolumeId(), VolumeCapability: capability, StagingTargetPath: staging,
				VolumeContext: vol.GetVolumeContext(), Secrets: sc.Secrets.NodeStageVolumeSecret,
			})
			Expect(err).NotTo(HaveOccurred())
		}
		path := filepath.Join(sc.TargetPath, "target")
		_, err := r.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
			VolumeId: vol.GetVolumeId(), VolumeCapability: capability, StagingTargetPath: staging, TargetPath: path,
			VolumeContext: vol.GetVolumeContext(), Secrets: sc.Secrets.NodePublishVolumeSecret,
		})
		Expect(err).NotTo(HaveOccurred())
		info, err := os.Stat(path)
		if err != nil {
			Skip("the published volume is not on this machine: " + err.Error())
		}
		if info.IsDir() {
			path = filepath.Join(path, "data")
		}
		file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		Expect(err).NotTo(HaveOccurred())
		defer file.Close()
		block := make([]byte, extentSize)
		for i := range block {
			block[i] = 0xa5
		}
		for i := int64(0); i < extents; i++ {
			_, err := file.WriteAt(block, i*extentStep)
			Expect(err).NotTo(HaveOccurred())
		}
		Expect(file.Sync()).To(Succeed())
	}

	BeforeEach(func() {
		res, err := csi.NewIdentityClient(sc.Conn).GetPluginCapabilities(context.Background(), &csi.GetPluginCapabilitiesRequest{})
		Expect(err).NotTo(HaveOccurred())
		provided := false
		for _, capability := range res.GetCapabilities() {
			provided = provided || capability.GetService().GetType() == csi.PluginCapability_Service_SNAPSHOT_METADATA_SERVICE
		}
		if !provided {
			Skip("SnapshotMetadata service not supported")
		}
		r = &Resources{
			Context:          sc,
			ControllerClient: csi.NewControllerClient(sc.ControllerConn),
			NodeClient:       csi.NewNodeClient(sc.Conn),
		}
		c = csi.NewSnapshotMetadataClient(sc.ControllerConn)
		vol := r.MustCreateVolume(context.Background(), MakeCreateVolumeReq(sc, UniqueString("sanity-metadata"))).GetVolume()
		base = snapshot("base", vol.GetVolumeId())
		write(vol)
		target = snapshot("target", vol.GetVolumeId())
	})

	AfterEach(func() {
		if r != nil {
			r.Cleanup()
		}
	})

	It("should implement both calls [both-calls]", func() {
		_, err := allocated(target, 0, 0)
		Expect(status.Code(err)).NotTo(Equal(codes.Unimplemented))
		_, err = delta(base, target, 0, 0)
		Expect(status.Code(err)).NotTo(Equal(codes.Unimplemented))
	})

	It("should return tuples of more than zero bytes [tuple-size]", func() {
		each(0, 0, func(messages []metadataMessage) {
			for _, tuple := range tuples(messages) {
				Expect(tuple.GetSizeBytes()).To(BeNumerically(">", 0))
				Expect(tuple.GetByteOffset()).To(BeNumerically(">=", 0))
			}
		})
	})

	It("should return ascending tuples without overlap, also across messages [ascending]", func() {
		each(0, 2, func(messages []metadataMessage) {
			end := int64(0)
			for _, tuple := range tuples(messages) {
				Expect(tuple.GetByteOffset()).To(BeNumerically(">=", end))
				end = tuple.GetByteOffset() + tuple.GetSizeBytes()
			}
		})
	})

	It("should return one block_metadata_type in all messages [type-constant]", func() {
		each(0, 1, func(messages []metadataMessage) {
			for _, message := range messages {
				Expect(message.GetBlockMetadataType()).To(Equal(messages[0].GetBlockMetadataType()))
			}
		})
	})

	It("should return one volume_capacity_bytes in all messages [capacity-constant]", func() {
		each(0, 1, func(messages []metadataMessage) {
			for _, message := range messages {
				Expect(message.GetVolumeCapacityBytes()).To(Equal(messages[0].GetVolumeCapacityBytes()))
			}
		})
	})

	It("should return at most max_results tuples in a message [max-results]", func() {
		each(0, 1, func(messages []metadataMessage) {
			for _, message := range messages {
				Expect(len(message.GetBlockMetadata())).To(BeNumerically("<=", 1))
			}
		})
	})

	It("should return no tuple that ends before starting_offset [first-tuple]", func() {
		for _, offset := range []int64{1, 512, 2*extentStep + 1, 3*extentStep + extentSize} {
			each(offset, 0, func(messages []metadataMessage) {
				if all := tuples(messages); len(all) > 0 {
					Expect(all[0].GetByteOffset() + all[0].GetSizeBytes()).To(BeNumerically(">", offset))
				}
			})
		}
	})

	It("should fail with OUT_OF_RANGE for a starting_offset beyond the volume [offset-beyond]", func() {
		_, first := allocated(target, math.MaxInt64, 0)
		_, second := delta(base, target, math.MaxInt64, 0)
		refused(codes.OutOfRange, first, second)
	})

	It("should fail with INVALID_ARGUMENT without a snapshot id [id-missing]", func() {
		_, first := allocated("", 0, 0)
		_, second := delta("", target, 0, 0)
		_, third := delta(base, "", 0, 0)
		refused(codes.InvalidArgument, first, second, third)
	})

	It("should fail with NOT_FOUND for a deleted snapshot [snapshot-deleted]", func() {
		_, err := r.DeleteSnapshot(context.Background(), MakeDeleteSnapshotReq(sc, target))
		Expect(err).NotTo(HaveOccurred())
		_, first := allocated(target, 0, 0)
		_, second := delta(base, target, 0, 0)
		refused(codes.NotFound, first, second)
	})
})
