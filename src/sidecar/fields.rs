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

/// Returns number and value of the next field, or `None` at the end of the message.
pub fn next_field<'m>(rest: &mut &'m [u8]) -> Result<Option<(u32, Value<'m>)>, DecodeError> {
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
