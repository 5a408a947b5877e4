// Package blocks reads a stream of block extents to its end, and continues it after an interruption.
package blocks

import (
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Extent is a range of bytes that has data, or that changed.
type Extent interface {
	GetByteOffset() int64
	GetSizeBytes() int64
}

// Message is a part of a response.
type Message[E Extent] interface{ GetBlockMetadata() []E }

// Next receives the next message.
type Next[E Extent] func() (Message[E], error)

// Print prints offset and length of each extent in bytes. open begins a response at a byte.
func Print[E Extent](open func(start int64) (Next[E], error)) error {
	for start, attempts := int64(0), 5; ; attempts-- {
		next, err := open(start)
		var message Message[E]
		for err == nil {
			if message, err = next(); err != nil {
				break
			}
			for _, extent := range message.GetBlockMetadata() {
				// A continued stream may repeat what was read.
				begin, end := max(extent.GetByteOffset(), start), extent.GetByteOffset()+extent.GetSizeBytes()
				if end > start {
					fmt.Println(begin, end-begin)
					start = end
				}
			}
		}
		if errors.Is(err, io.EOF) {
			return nil // Only a stream that ends without an error is complete.
		}
		code := status.Code(err)
		if attempts == 1 || code != codes.Unavailable && code != codes.DeadlineExceeded {
			return err
		}
		time.Sleep(time.Second)
	}
}
