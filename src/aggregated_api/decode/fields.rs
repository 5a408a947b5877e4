//! Fields of a JSON object that its description does not know, and fields that are there twice, which JSON's usual readers do
//! not tell.

use std::cell::RefCell;
use std::fmt;

use serde::Deserializer;
use serde::de::{DeserializeSeed, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::aggregated_api::openapi::{SCHEMA, known};
use crate::grpc::cut;

/// What is told of one object, at most, and how long each is, in bytes.
const MAX_ODD: usize = 20;
pub const MAX_TOLD: usize = 1024;

/// Other names of fields, by their paths.
const ALIASES: [&str; 2] =
    ["spec.volumeSnapshotDeltaSecretRef", "spec.VolumeSnapshotDeltaSecretRef"];
/// What is not looked into: it is dropped.
const DROPPED: &str = "status";

/// The value, of which the last of fields with the same name counts, and the paths of those that are there twice. How deep it may
/// be is bounded by the reader (128).
pub fn read(json: &[u8]) -> serde_json::Result<(Value, Vec<String>)> {
    let doubled = RefCell::new(Vec::new());
    let mut reader = serde_json::Deserializer::from_slice(json);
    let value = Reader { path: Path::Root, doubled: &doubled }.deserialize(&mut reader)?;
    reader.end()?;
    Ok((value, doubled.into_inner()))
}

/// What is to be told of a value's fields, in the API server's words.
pub fn odd(value: &Value, doubled: Vec<String>) -> Vec<String> {
    let mut unknown = Vec::new();
    look("", value, &SCHEMA, &mut unknown);
    let told = |what: &str, path: String| cut(&format!("{what} field {path:?}"), MAX_TOLD);
    let unknown = unknown.into_iter().map(|path| told("unknown", path));
    let doubled = doubled.into_iter().map(|path| told("duplicate", path));
    unknown.chain(doubled).take(MAX_ODD).collect()
}

fn look(path: &str, value: &Value, schema: &Value, unknown: &mut Vec<String>) {
    if unknown.len() >= MAX_ODD {
        return;
    }
    if let (Value::Array(list), Some(items)) = (value, schema.get("items")) {
        for (at, one) in list.iter().enumerate() {
            look(&format!("{path}[{at}]"), one, items, unknown);
        }
    }
    let (Some(object), Some(fields)) = (value.as_object(), known(schema)) else { return };
    for (name, field) in object {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        match fields.get(name) {
            _ if path == DROPPED => {}
            Some(schema) => look(&path, field, schema, unknown),
            None if ALIASES.contains(&path.as_str()) => {
                look(&path, field, &fields["secretRef"], unknown);
            }
            None => unknown.push(path),
        }
    }
}

/// Takes away fields that are null: they are as good as not there.
pub fn without_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, field| !field.is_null());
            map.values_mut().for_each(without_nulls);
        }
        Value::Array(list) => list.iter_mut().for_each(without_nulls),
        _ => {}
    }
}

/// Where in a value something stands.
#[derive(Clone, Copy)]
enum Path<'a> {
    Root,
    Field(&'a Path<'a>, &'a str),
    Item(&'a Path<'a>, usize),
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root => Ok(()),
            Self::Field(Path::Root, name) => f.write_str(name),
            Self::Field(outer, name) => write!(f, "{outer}.{name}"),
            Self::Item(outer, at) => write!(f, "{outer}[{at}]"),
        }
    }
}

struct Reader<'a> {
    path: Path<'a>,
    doubled: &'a RefCell<Vec<String>>,
}

impl<'de> DeserializeSeed<'de> for Reader<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Reader<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value of JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("not a number"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        loop {
            let path = Path::Item(&self.path, list.len());
            match items.next_element_seed(Reader { path, doubled: self.doubled })? {
                Some(item) => list.push(item),
                None => return Ok(Value::Array(list)),
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(name) = fields.next_key::<String>()? {
            let path = Path::Field(&self.path, &name);
            let field = fields.next_value_seed(Reader { path, doubled: self.doubled })?;
            let mut doubled = self.doubled.borrow_mut();
            if map.contains_key(&name) && doubled.len() < MAX_ODD {
                doubled.push(path.to_string());
            }
            map.insert(name, field);
        }
        Ok(Value::Object(map))
    }
}
