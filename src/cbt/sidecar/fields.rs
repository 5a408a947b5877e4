//! Reads the fields of an encoded protobuf message, without decoding the message. Both APIs use the
//! same field numbers in responses.

use prost::DecodeError;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

/// Number of the field that holds the extents, in both responses.
pub const BLOCK_METADATA: u32 = 3;

/// Value of a field.
#[derive(Debug)]
pub enum Value<'m> {
    Number(u64),
    Bytes(&'m [u8]),
    /// Wire types that neither API uses: fixed-length numbers, groups.
    Other,
}

/// Returns number, value and what follows of a field whose key and length take one byte each, as
/// all extents do: a stream has millions of them.
fn short_field(message: &[u8]) -> Option<(u32, &[u8], &[u8])> {
    const LENGTH_DELIMITED: u8 = 2;
    let [key @ 0x08..0x80, length @ 0..0x80, rest @ ..] = message else { return None };
    let (bytes, after) = rest.split_at_checked(usize::from(*length))?;
    (key & 7 == LENGTH_DELIMITED).then_some((u32::from(key >> 3), bytes, after))
}

/// Returns number and value of the next field, or `None` at the end of the message.
#[inline]
pub fn next_field<'m>(rest: &mut &'m [u8]) -> Result<Option<(u32, Value<'m>)>, DecodeError> {
    if let Some((field, bytes, after)) = short_field(rest) {
        *rest = after;
        return Ok(Some((field, Value::Bytes(bytes))));
    }
    if rest.is_empty() {
        return Ok(None);
    }
    let (field, wire_type) = decode_key(rest)?;
    let whole = *rest;
    let value = match wire_type {
        WireType::Varint => Value::Number(decode_varint(rest)?),
        WireType::LengthDelimited => {
            skip_field(wire_type, field, rest, DecodeContext::default())?;
            let mut bytes = &whole[..whole.len() - rest.len()];
            decode_varint(&mut bytes)?;
            Value::Bytes(bytes)
        }
        _ => {
            skip_field(wire_type, field, rest, DecodeContext::default())?;
            Value::Other
        }
    };
    Ok(Some((field, value)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The field as prost alone reads it.
    fn by_prost<'m>(rest: &mut &'m [u8]) -> Option<(u32, &'m [u8])> {
        let (field, wire_type) = decode_key(rest).ok()?;
        let mut value = *rest;
        skip_field(wire_type, field, rest, DecodeContext::default()).ok()?;
        value = &value[..value.len() - rest.len()];
        if wire_type == WireType::LengthDelimited {
            decode_varint(&mut value).ok()?;
        }
        Some((field, value))
    }

    proptest! {
        #[test]
        fn short_fields_are_read_as_prost_reads_them(
            key in any::<u8>(),
            length in any::<u8>(),
            bytes in proptest::collection::vec(any::<u8>(), 0..140),
        ) {
            let message = [&[key, length], bytes.as_slice()].concat();
            if let Some((field, value, after)) = short_field(&message) {
                let mut rest = message.as_slice();
                prop_assert_eq!(by_prost(&mut rest), Some((field, value)));
                prop_assert_eq!(rest, after);
            }
        }
    }
}
