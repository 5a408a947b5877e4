//! Accepts clients of grpc-core (Python, C++, Ruby, PHP). They send the percent-encoded path of a
//! unix socket as `:authority`, which the HTTP library refuses as no valid host (RST_STREAM with
//! PROTOCOL_ERROR). What reads a connection here replaces each `%` of that header by `-`; nothing
//! uses its value.
//!
//! Only the bounds of frames and header fields are followed, and nothing is decoded.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

use super::hints::{self, Sent};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// The entry of HPACK's static table (RFC 7541, appendix A).
const AUTHORITY: u8 = 1;
const NAME: &[u8] = b":authority";

/// A connection whose clients may send any `:authority`.
pub struct AnyAuthority<S> {
    stream: S,
    frames: Frames,
    sent: Sent,
}

impl<S> AnyAuthority<S> {
    pub fn new(stream: S) -> Self {
        Self { stream, frames: Frames::default(), sent: Sent::default() }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for AnyAuthority<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let was_foreign = self.frames.is_foreign();
        buffer.filled_mut()[before..].iter_mut().for_each(|byte| self.frames.pass(byte));
        if !was_foreign && self.frames.is_foreign() {
            hints::foreign_protocol();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for AnyAuthority<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(context, bytes))?;
        self.sent.pass(&bytes[..written]);
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(context, parts))?;
        let mut left = written;
        for part in parts {
            let length = part.len().min(left);
            self.sent.pass(&part[..length]);
            left -= length;
        }
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl<S: Connected> Connected for AnyAuthority<S> {
    type ConnectInfo = S::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.connect_info()
    }
}

/// Where in the frames of a connection the next byte is.
#[derive(Debug)]
enum Place {
    /// After so many bytes of the preface.
    Preface(usize),
    /// In the nine bytes before a frame's payload.
    Head([u8; 9], usize),
    /// Of the payload: bytes until its end. These are passed on.
    Skipped(u32),
    /// The length of the padding, which follows the fields.
    PadLength(u32, u8),
    /// Bytes before the fields, the bytes of these, and the padding.
    Lead(u32, u32, u32),
    Fields(u32, u32),
    /// No HTTP/2.
    Foreign,
}

impl Default for Place {
    fn default() -> Self {
        Self::Preface(0)
    }
}

#[derive(Debug, Default)]
struct Frames {
    place: Place,
    field: Field,
}

impl Frames {
    fn is_foreign(&self) -> bool {
        matches!(self.place, Place::Foreign)
    }

    fn pass(&mut self, byte: &mut u8) {
        self.place = match std::mem::take(&mut self.place) {
            Place::Preface(seen) => Self::preface(seen, *byte),
            Place::Head(mut head, seen) => {
                head[seen] = *byte;
                match seen + 1 {
                    9 => self.payload(&head),
                    seen => Place::Head(head, seen),
                }
            }
            Place::Skipped(left) => skipped(left - 1),
            Place::PadLength(left, lead) => {
                let (pad, lead) = (u32::from(*byte), u32::from(lead));
                match (left - 1).checked_sub(pad + lead) {
                    Some(fields) => lead_or_fields(lead, fields, pad),
                    // The HTTP library refuses it.
                    None => skipped(left - 1),
                }
            }
            Place::Lead(left, fields, pad) => lead_or_fields(left - 1, fields, pad),
            Place::Fields(left, pad) => {
                self.field.pass(byte);
                lead_or_fields(0, left - 1, pad)
            }
            Place::Foreign => Place::Foreign,
        };
    }

    fn preface(seen: usize, byte: u8) -> Place {
        match seen + 1 {
            _ if PREFACE[seen] != byte => Place::Foreign,
            all if all == PREFACE.len() => Place::Head([0; 9], 0),
            seen => Place::Preface(seen),
        }
    }

    fn payload(&mut self, head: &[u8; 9]) -> Place {
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let (kind, flags) = (head[3], head[4]);
        let has = |flag| kind == HEADERS && flags & flag != 0;
        if kind == HEADERS {
            self.field = Field::Begin;
        }
        let lead = if has(PRIORITY) { 5 } else { 0 };
        match kind {
            HEADERS if has(PADDED) && length > 0 => Place::PadLength(length, lead),
            HEADERS | CONTINUATION => match length.checked_sub(u32::from(lead)) {
                Some(fields) => lead_or_fields(u32::from(lead), fields, 0),
                None => skipped(length),
            },
            _ => skipped(length),
        }
    }
}

fn skipped(left: u32) -> Place {
    if left == 0 { Place::Head([0; 9], 0) } else { Place::Skipped(left) }
}

fn lead_or_fields(lead: u32, fields: u32, pad: u32) -> Place {
    match (lead, fields) {
        (0, 0) => skipped(pad),
        (0, fields) => Place::Fields(fields, pad),
        (lead, fields) => Place::Lead(lead, fields, pad),
    }
}

/// Where in the fields of a header block the next byte is (RFC 7541, section 6).
#[derive(Debug, Default, Clone, Copy)]
enum Field {
    #[default]
    Begin,
    /// In an index or size of several bytes; whether a value follows.
    Number { has_value: bool },
    /// Before the length of a string.
    Length(Text),
    /// In a length of several bytes.
    LongLength { of: Text, length: u32, shift: u32 },
    /// In a string, with so many bytes left.
    Text(Text, u32),
}

/// A string.
#[derive(Debug, Clone, Copy)]
enum Text {
    /// Of which so many bytes are those of `:authority`; `None` if it is another name.
    Name(Option<usize>),
    Value {
        is_authority: bool,
    },
}

impl Field {
    fn pass(&mut self, byte: &mut u8) {
        *self = match *self {
            Self::Begin => Self::begin(*byte),
            Self::Number { has_value } if *byte & 0x80 == 0 => Self::after_index(has_value, false),
            Self::Number { has_value } => Self::Number { has_value },
            Self::Length(of) => {
                // With Huffman code, which these clients do not use.
                let of = match (of, *byte & 0x80) {
                    (of, 0) => of,
                    (Text::Name(_), _) => Text::Name(None),
                    (Text::Value { .. }, _) => Text::Value { is_authority: false },
                };
                match u32::from(*byte & 0x7f) {
                    0x7f => Self::LongLength { of, length: 0x7f, shift: 0 },
                    left => Self::text(of, left),
                }
            }
            Self::LongLength { of, length, shift } => {
                let part = u32::from(*byte & 0x7f).checked_shl(shift).unwrap_or(u32::MAX);
                let length = length.saturating_add(part);
                match *byte & 0x80 {
                    0 => Self::text(of, length),
                    _ => Self::LongLength { of, length, shift: shift.saturating_add(7) },
                }
            }
            Self::Text(of, left) => {
                let of = match of {
                    Text::Name(seen) => {
                        let next = |seen: &usize| NAME.get(*seen) == Some(byte);
                        Text::Name(seen.filter(next).map(|seen| seen + 1))
                    }
                    Text::Value { is_authority } => {
                        if is_authority && matches!(*byte, b'%' | b'/') {
                            *byte = b'-';
                        }
                        of
                    }
                };
                Self::text(of, left - 1)
            }
        };
    }

    fn begin(byte: u8) -> Self {
        // The bits of the index, and whether a value follows.
        let (mask, has_value) = match byte {
            0x80.. => (0x7f, false),
            0x40.. => (0x3f, true),
            0x20.. => (0x1f, false),
            _ => (0x0f, true),
        };
        match byte & mask {
            index if index == mask => Self::Number { has_value },
            0 if has_value => Self::Length(Text::Name(Some(0))),
            index => Self::after_index(has_value, index == AUTHORITY),
        }
    }

    fn after_index(has_value: bool, is_authority: bool) -> Self {
        match has_value {
            true => Self::Length(Text::Value { is_authority }),
            false => Self::Begin,
        }
    }

    fn text(of: Text, left: u32) -> Self {
        match (left, of) {
            (0, Text::Name(seen)) => {
                Self::after_index(true, seen.is_some_and(|seen| seen == NAME.len()))
            }
            (0, Text::Value { .. }) => Self::Begin,
            _ => Self::Text(of, left),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
    }

    fn literal(first: &[u8], value: &[u8]) -> Vec<u8> {
        [first, &[u8::try_from(value.len()).unwrap()], value].concat()
    }

    fn passed(bytes: &[u8]) -> Vec<u8> {
        let (mut frames, mut bytes) = (Frames::default(), bytes.to_vec());
        bytes.iter_mut().for_each(|byte| frames.pass(byte));
        bytes
    }

    #[test]
    fn only_an_authority_loses_its_percent_signs() {
        let long = [b'%'; 200];
        let fields = |authority: &[u8]| {
            [
                vec![0x82, 0x3f, 0xe1, 0x1f],
                literal(&[0x44], b"/csi.v1.Identity/A%2F"),
                literal(&[0x41], authority),
                literal(&[0x01], authority),
                literal(&literal(&[0x40], b":authority"), authority),
                literal(&literal(&[0x40], b":authorit"), b"y%"),
                // A name of its own, and an index and a value that take several bytes.
                literal(&literal(&[0x40], b"x%A"), b"A\x04%2F%"),
                [&[0x7f, 0x20, 0x7f, 200 - 0x7f][..], &long].concat(),
                vec![0x41, 0x82, b'%', b'%'],
                literal(&[0x11], authority),
            ]
            .concat()
        };
        let stream = |authority: &[u8]| {
            let block = fields(authority);
            let (first, second) = block.split_at(40);
            let padded = [&[3, 0, 0, 0, 0, 9][..], &block, b"%%%"].concat();
            [
                PREFACE.to_vec(),
                frame(4, 0, b""),
                frame(HEADERS, 0, first),
                frame(CONTINUATION, 4, second),
                frame(0, 1, b"\x41\x03%%%"),
                frame(HEADERS, 4 | PADDED | PRIORITY, &padded),
                frame(HEADERS, 4, &block),
            ]
            .concat()
        };
        assert_eq!(passed(&stream(b"%2Ftmp%2Fcsi.sock")), stream(b"-2Ftmp-2Fcsi.sock"));
        assert_eq!(passed(&stream(b"/run/csi.sock")), stream(b"-run-csi.sock"));
    }

    #[test]
    fn what_is_no_http2_is_passed_on() {
        for bytes in [&b"GET / HTTP/1.1\r\n%"[..], b"PRI * HTTP/2.1%"] {
            assert_eq!(passed(bytes), bytes);
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_passed_on_with_their_length(bytes: Vec<u8>) {
            let all = [PREFACE, &bytes].concat();
            let out = passed(&all);
            assert_eq!(out.len(), all.len());
            let replaced = |old| matches!(old, b'%' | b'/');
            assert!(out.iter().zip(&all).all(|(new, old)| new == old || (replaced(*old) && *new == b'-')));
        }
    }
}
