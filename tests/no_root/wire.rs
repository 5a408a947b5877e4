//! The .proto files in src/grpc match the tables in tests/data exactly: csi.proto is CSI v1.12 and
//! v1.13 with the additions of the KEPs, snapshotmetadata.proto the released SnapshotMetadata API,
//! snapshotsession.proto the session API of KEP-3314, crust.proto the Runtime API of crust_ops, and
//! admin.proto the driver's administration. Tables and compiled descriptors are converted to sets
//! of `Fact`s, one per line, which must be equal. Notes are compared too: oneofs come from the
//! descriptor, `secret`, `alpha` and `extension` from markers in comments. Everything in an
//! extension message is an extension.

use std::{
    collections::{BTreeSet, HashMap},
    fmt,
};

use prost_types::{
    DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorProto,
    ServiceDescriptorProto,
    field_descriptor_proto::{Label, Type},
};

use crate::generated::descriptors;

/// Packages and their tables.
const TABLES: [(&str, &str); 7] = [
    ("csi.v1", RELEASES[0]),
    ("csi.v1", RELEASES[1]),
    ("csi.v1", EXTENSIONS),
    ("snapshotmetadata", include_str!("../data/snapshotmetadata-v1.tsv")),
    ("snapshotsession", include_str!("../data/snapshotsession-v1alpha2.tsv")),
    ("crust", include_str!("../data/crust-v1.tsv")),
    ("csiloopback.admin.v1", include_str!("../data/admin-v1.tsv")),
];
/// What CSI v1.12 has and v1.13 no longer has, and v1.13.
const RELEASES: [&str; 2] =
    [include_str!("../data/csi-v1.12.tsv"), include_str!("../data/csi-v1.13.tsv")];
/// CSI assigns numbers consecutively, and its releases use smaller numbers than this.
const OUT_OF_REACH: i32 = 1000;
/// Additions of the KEPs to CSI.
const EXTENSIONS: &str = include_str!("../data/csi-extensions.tsv");
const HEADER: &str = "kind\tin\tname\tnumber\ttype\tnotes";

/// Markers in comments of csi.proto, and their notes in the table.
const MARKERS: [(&[&str], &str); 3] = [
    (&["Secret: never logged."], "secret"),
    (&["Alpha."], "alpha"),
    (&EXTENSION_MARKERS, EXTENSION_NOTE),
];
const EXTENSION_MARKERS: [&str; 2] = ["KEP-3314 extension.", "KEP-2857 extension."];
const EXTENSION_NOTE: &str = "extension";

/// One row: kind, in, name, number, type, notes. A column can be empty.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Fact([String; 6]);

const PARENT: usize = 1;
const NUMBER: usize = 3;
const TYPE: usize = 4;
const NOTES: usize = 5;

impl Fact {
    fn new(kind: &str, parent: &str, name: &str) -> Self {
        Fact([kind, parent, name, "", "", ""].map(str::to_owned))
    }

    fn with(mut self, column: usize, value: impl ToString) -> Self {
        self.0[column] = value.to_string();
        self
    }

    /// The identity of the row: kind, parent and name.
    fn subject(&self) -> &[String] {
        &self.0[..NUMBER]
    }
}

impl fmt::Display for Fact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.join(" | ").trim_end_matches(" | "))
    }
}

fn table() -> BTreeSet<Fact> {
    TABLES.iter().flat_map(|(_, table)| facts_of(table)).collect()
}

/// The rows of one table.
fn facts_of(table: &str) -> BTreeSet<Fact> {
    let mut facts = BTreeSet::new();
    let mut lines = table.lines();
    assert_eq!(lines.next(), Some(HEADER), "columns");
    for (line, number) in lines.zip(2..) {
        let columns: Vec<_> = line.split('\t').map(str::to_owned).collect();
        let fact = Fact(columns.try_into().unwrap_or_else(|columns: Vec<_>| {
            panic!("line {number} has {} columns: {line}", columns.len())
        }));
        assert!(facts.insert(fact), "line {number} is a duplicate: {line}");
    }
    facts
}

fn descriptor() -> BTreeSet<Fact> {
    let set = descriptors();
    let known = |package| TABLES.iter().any(|(known, _)| *known == package);
    let files = set.file.iter().filter(|file| known(file.package()));
    files.flat_map(|file| Reader::new(file).facts()).collect()
}

/// Converts the descriptor of a file to facts.
struct Reader<'a> {
    file: &'a FileDescriptorProto,
    comments: HashMap<&'a [i32], String>,
    facts: Vec<Fact>,
    /// Whether the current message is an extension.
    extending: bool,
}

impl<'a> Reader<'a> {
    fn new(file: &'a FileDescriptorProto) -> Self {
        let info = file.source_code_info.as_ref().expect("comments are kept");
        let comments = info.location.iter().map(|at| {
            let text = format!("{}\n{}", at.leading_comments(), at.trailing_comments());
            (at.path.as_slice(), text)
        });
        Reader { file, comments: comments.collect(), facts: Vec::new(), extending: false }
    }

    /// The numbers in paths are field numbers of descriptor.proto, as in `SourceCodeInfo`.
    fn facts(mut self) -> Vec<Fact> {
        let file = self.file;
        // The syntax determines field presence, so it is part of the wire format.
        assert_eq!(file.syntax(), "proto3", "syntax of {}", file.name());
        self.extensions(&file.extension);
        for (message, i) in file.message_type.iter().zip(0..) {
            self.message(file.package(), message, &[4, i]);
        }
        for (declared, i) in file.enum_type.iter().zip(0..) {
            self.enumeration(file.package(), declared, &[5, i]);
        }
        for (service, i) in file.service.iter().zip(0..) {
            self.service(service, &[6, i]);
        }
        self.facts
    }

    fn message(&mut self, parent: &str, message: &DescriptorProto, path: &[i32]) {
        let name = format!("{parent}.{}", message.name());
        let outside = self.extending;
        let comment = self.comment(path);
        self.extending |= EXTENSION_MARKERS.iter().any(|marker| comment.contains(marker));
        self.add(Fact::new("message", &name, ""), None, path);
        self.extensions(&message.extension);
        for (field, i) in message.field.iter().zip(0..) {
            // protoc represents a proto3 `optional` as a synthetic oneof, which is not in the
            // tables.
            let oneof = (field.oneof_index.filter(|_| !field.proto3_optional()))
                .map(|at| format!("oneof {}", message.oneof_decl[at as usize].name()));
            let fact = Fact::new("field", &name, field.name())
                .with(NUMBER, field.number())
                .with(TYPE, field_type(field, message));
            self.add(fact, oneof, &join(path, &[2, i]));
        }
        for (nested, i) in message.nested_type.iter().zip(0..) {
            if !is_map_entry(nested) {
                self.message(&name, nested, &join(path, &[3, i]));
            }
        }
        for (declared, i) in message.enum_type.iter().zip(0..) {
            self.enumeration(&name, declared, &join(path, &[4, i]));
        }
        self.extending = outside;
    }

    fn enumeration(&mut self, parent: &str, declared: &EnumDescriptorProto, path: &[i32]) {
        let name = format!("{parent}.{}", declared.name());
        self.add(Fact::new("enum", &name, ""), None, path);
        for (value, i) in declared.value.iter().zip(0..) {
            let fact = Fact::new("value", &name, value.name()).with(NUMBER, value.number());
            self.add(fact, None, &join(path, &[2, i]));
        }
    }

    fn service(&mut self, service: &ServiceDescriptorProto, path: &[i32]) {
        let name = format!("{}.{}", self.file.package(), service.name());
        self.add(Fact::new("service", &name, ""), None, path);
        for (method, i) in service.method.iter().zip(0..) {
            let side =
                |streams, of| format!("{}{}", if streams { "stream " } else { "" }, bare(of));
            let input = side(method.client_streaming(), method.input_type());
            let output = side(method.server_streaming(), method.output_type());
            let fact = Fact::new("rpc", &name, method.name());
            let fact = fact.with(TYPE, format!("{input} -> {output}"));
            self.add(fact, None, &join(path, &[2, i]));
        }
    }

    /// Protobuf extensions, a separate kind of fact, because the tables have none.
    fn extensions(&mut self, extensions: &[FieldDescriptorProto]) {
        for field in extensions {
            let fact = Fact::new("extension", bare(field.extendee()), field.name());
            self.facts.push(fact.with(NUMBER, field.number()));
        }
    }

    fn comment(&self, path: &[i32]) -> &str {
        self.comments.get(path).map_or("", String::as_str)
    }

    fn add(&mut self, fact: Fact, oneof: Option<String>, path: &[i32]) {
        let comment = self.comment(path);
        let marked = MARKERS.iter().filter(|(texts, note)| {
            let is_said = texts.iter().any(|text| comment.contains(text));
            is_said || (self.extending && *note == EXTENSION_NOTE)
        });
        let notes: Vec<_> =
            oneof.into_iter().chain(marked.map(|(_, note)| (*note).to_owned())).collect();
        self.facts.push(fact.with(NOTES, notes.join(",")));
    }
}

fn join(path: &[i32], rest: &[i32]) -> Vec<i32> {
    [path, rest].concat()
}

/// Removes the leading dot of full names in descriptors.
fn bare(name: &str) -> &str {
    name.strip_prefix('.').unwrap_or(name)
}

fn is_map_entry(message: &DescriptorProto) -> bool {
    message.options.as_ref().is_some_and(|it| it.map_entry())
}

/// The type in the notation of the tables, with its label. `message` is the parent of the field.
fn field_type(field: &FieldDescriptorProto, message: &DescriptorProto) -> String {
    let entry = message.nested_type.iter().find(|nested| {
        let name = format!(".{}", nested.name());
        is_map_entry(nested) && field.type_name().ends_with(&name)
    });
    if let Some(DescriptorProto { field: pair, .. }) = entry {
        let [key, value] = [0, 1].map(|at| plain_type(&pair[at]));
        return format!("map<{key},{value}>");
    }
    let plain = plain_type(field);
    match field.label() {
        Label::Repeated => format!("repeated {plain}"),
        Label::Required => format!("required {plain}"),
        Label::Optional if field.proto3_optional() => format!("optional {plain}"),
        Label::Optional => plain,
    }
}

fn plain_type(field: &FieldDescriptorProto) -> String {
    match field.r#type() {
        Type::Message | Type::Enum => bare(field.type_name()).to_owned(),
        scalar => scalar.as_str_name().trim_start_matches("TYPE_").to_lowercase(),
    }
}

/// Facts of `these` that are missing in `those`, each with the fact of `those` about the same
/// subject.
fn missing_in(these: &BTreeSet<Fact>, those: &BTreeSet<Fact>) -> Vec<String> {
    let name = |fact: &Fact| {
        let other = those.iter().find(|it| it.subject() == fact.subject());
        match other {
            Some(other) => format!("{fact}\n    other side: {other}"),
            None => format!("{fact}\n    other side: missing"),
        }
    };
    these.difference(those).map(name).collect()
}

#[test]
fn every_row_of_the_tables_is_in_the_descriptor() {
    let missing = missing_in(&table(), &descriptor());
    assert!(
        missing.is_empty(),
        "rows of a table that are missing in its .proto:\n{}",
        missing.join("\n")
    );
}

#[test]
fn the_descriptor_has_nothing_the_tables_lack() {
    let surplus = missing_in(&descriptor(), &table());
    assert!(
        surplus.is_empty(),
        "a .proto has facts that are missing in its table:\n{}",
        surplus.join("\n")
    );
}

/// The tables of CSI releases have no extensions, and the table of extensions has nothing else.
#[test]
fn extensions_have_a_separate_table_and_markers() {
    let marked = |line: &str| line.split([',', '\t']).any(|note| note == EXTENSION_NOTE);
    for (package, table) in TABLES {
        for line in table.lines().skip(1) {
            assert_eq!(marked(line), table == EXTENSIONS, "{package}: {line}");
        }
    }
}

/// If CSI assigns the number of an extension, a standard driver seems to have the extension: a
/// driver without DEFER_FS_OPS would mount volumes on the host that the node proxy deferred.
#[test]
fn extensions_use_no_name_or_number_of_a_csi_release() {
    let released: Vec<Fact> = RELEASES.into_iter().flat_map(facts_of).collect();
    for extension in facts_of(EXTENSIONS) {
        let siblings = || released.iter().filter(|one| one.0[PARENT] == extension.0[PARENT]);
        let clash = siblings().find(|one| collide(one, &extension));
        assert_eq!(clash, None, "{extension}");
        if siblings().next().is_some() && !extension.0[NUMBER].is_empty() {
            let number: i32 = extension.0[NUMBER].parse().expect("a number");
            assert!(number >= OUT_OF_REACH, "CSI can assign this number: {extension}");
        }
    }
}

/// Whether two rows of a parent have the same name or number.
fn collide(one: &Fact, other: &Fact) -> bool {
    let has_number = !one.0[NUMBER].is_empty();
    one.subject()[PARENT..] == other.subject()[PARENT..]
        || (has_number && one.0[NUMBER] == other.0[NUMBER])
}
