//! Splits source files into comments, strings and identifiers, for tests of names and language. It
//! knows the syntax of Rust, which covers Go and protobuf, and of files with `#` comments.

use std::path::Path;

/// What a piece of a source file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A comment, or a block of line comments.
    Comment,
    /// The content of a string literal, with its escapes.
    Text,
    Identifier,
    /// Punctuation, or a line of a file without Rust's syntax.
    Code,
}

/// A piece of a source file.
#[derive(Debug, Clone)]
pub struct Piece {
    pub kind: Kind,
    /// Line of the first character.
    pub line: usize,
    pub text: String,
}

/// The pieces of a file.
pub fn pieces(path: &Path, text: &str) -> Vec<Piece> {
    let extension = path.extension().and_then(|extension| extension.to_str());
    match extension {
        Some("rs" | "go" | "proto") => {
            let mut reader = Reader { rest: text, line: 1, pieces: Vec::new() };
            while reader.next(extension == Some("go")) {}
            reader.pieces
        }
        _ => lines(text),
    }
}

/// Lines of code, and blocks of comment lines.
fn lines(text: &str) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    for (text, line) in text.lines().zip(1..) {
        let comment = text.trim_start().strip_prefix('#');
        match (comment, pieces.last_mut()) {
            (Some(more), Some(block)) if block.kind == Kind::Comment => {
                block.text.push('\n');
                block.text.push_str(more);
            }
            (Some(more), _) => {
                pieces.push(Piece { kind: Kind::Comment, line, text: more.to_owned() });
            }
            (None, _) => pieces.push(Piece { kind: Kind::Code, line, text: text.to_owned() }),
        }
    }
    pieces
}

struct Reader<'a> {
    rest: &'a str,
    line: usize,
    pieces: Vec<Piece>,
}

impl Reader<'_> {
    /// Reads one piece. False at the end of the file.
    fn next(&mut self, has_backtick_strings: bool) -> bool {
        let Some(first) = self.rest.chars().next() else { return false };
        let raw = self.rest.trim_start_matches(['b', 'c']);
        let hashes = raw.strip_prefix('r').map(|raw| raw.len() - raw.trim_start_matches('#').len());
        let is_raw = |hashes: &usize| raw[1 + hashes..].starts_with('"');
        if self.rest.starts_with("//") {
            self.line_comment();
        } else if self.rest.starts_with("/*") {
            let end = self.rest.find("*/").map_or(self.rest.len(), |end| end + 2);
            self.take(Kind::Comment, end);
        } else if let Some(hashes) = hashes.filter(is_raw) {
            let start = self.rest.len() - raw.len() + hashes + 2;
            let close = format!("\"{}", "#".repeat(hashes));
            let length = self.rest[start..].find(&close).unwrap_or(self.rest.len() - start);
            self.skip(start);
            self.take(Kind::Text, length);
            self.skip(close.len());
        } else if first == '"' || (first == '`' && has_backtick_strings) {
            self.skip(1);
            let length = end_of_string(self.rest, first);
            self.take(Kind::Text, length);
            self.skip(1);
        } else if first == '\'' {
            self.character();
        } else if first.is_alphabetic() || first == '_' {
            let is_part = |letter: char| letter.is_alphanumeric() || letter == '_';
            let length = self.rest.find(|letter| !is_part(letter)).unwrap_or(self.rest.len());
            self.take(Kind::Identifier, length);
        } else if first.is_whitespace() {
            self.skip(first.len_utf8());
        } else {
            self.take(Kind::Code, first.len_utf8());
        }
        true
    }

    /// Adjacent lines form one block.
    fn line_comment(&mut self) {
        let length = self.rest.find('\n').unwrap_or(self.rest.len());
        let text = self.rest[..length].trim_start_matches(['/', '!']).to_owned();
        let line = self.line;
        self.skip(length);
        match self.pieces.last_mut() {
            Some(block)
                if block.kind == Kind::Comment
                    && block.line + block.text.split('\n').count() == line =>
            {
                block.text.push('\n');
                block.text.push_str(&text);
            }
            _ => self.pieces.push(Piece { kind: Kind::Comment, line, text }),
        }
    }

    /// A character, a byte or a lifetime.
    fn character(&mut self) {
        let mut letters = self.rest.char_indices().skip(1);
        let (_, first) = letters.next().unwrap_or_default();
        let (end, second) = letters.next().unwrap_or_default();
        let length = match (first, second) {
            ('\\', _) => 2 + end_of_string(&self.rest[1..], '\''),
            (_, '\'') => end + 1,
            _ => 1,
        };
        self.skip(length.min(self.rest.len()));
    }

    fn take(&mut self, kind: Kind, length: usize) {
        self.pieces.push(Piece { kind, line: self.line, text: self.rest[..length].to_owned() });
        self.skip(length);
    }

    fn skip(&mut self, length: usize) {
        let (skipped, rest) = self.rest.split_at(length.min(self.rest.len()));
        self.line += skipped.matches('\n').count();
        self.rest = rest;
    }
}

/// Position of the closing quote.
fn end_of_string(text: &str, quote: char) -> usize {
    let mut is_escaped = false;
    for (at, letter) in text.char_indices() {
        match letter {
            '\\' if quote != '`' && !is_escaped => is_escaped = true,
            _ if letter == quote && !is_escaped => return at,
            _ => is_escaped = false,
        }
    }
    text.len()
}

/// The words of a piece in lower case, each with its line. Underscores and capitals separate the
/// words of an identifier; code between backticks in a comment is omitted.
pub fn words(piece: &Piece) -> Vec<(usize, String)> {
    let mut words = Vec::new();
    for (text, line) in piece.text.split('\n').zip(piece.line..) {
        let text = match piece.kind {
            Kind::Comment => without_code(text),
            // An escape such as \n is not part of the next word.
            Kind::Text => text.replace("\\n", " "),
            _ => text.to_owned(),
        };
        let parts = text.split(|letter: char| !letter.is_alphanumeric());
        let parts = parts.flat_map(split_at_capitals).filter(|word| !word.is_empty());
        words.extend(parts.map(|word| (line, word.to_lowercase())));
    }
    words
}

/// The line without the parts between backticks.
pub fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join(" ")
}

fn split_at_capitals(word: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let (mut start, mut was_lower) = (0, false);
    for (at, letter) in word.char_indices() {
        if letter.is_uppercase() && was_lower {
            parts.push(&word[start..at]);
            start = at;
        }
        was_lower = letter.is_lowercase() || letter.is_numeric();
    }
    parts.push(&word[start..]);
    parts
}

#[test]
fn a_source_file_is_split_into_its_pieces() {
    let source = "//! One told\n//!\n/// story.\nfn was_asked<'a>(x: char) { let y = r#\"a \"b\" c\"#; \
                  print('\\'', 'x', \"d \\\" e\"); } // end\n";
    let pieces = pieces(Path::new("x.rs"), source);
    let of = |kind| {
        let found = pieces.iter().filter(|piece| piece.kind == kind);
        found.map(|piece| piece.text.trim()).collect::<Vec<_>>()
    };
    assert_eq!(of(Kind::Text), ["a \"b\" c", "d \\\" e"]);
    assert_eq!(of(Kind::Comment).len(), 2);
    assert!(of(Kind::Identifier).contains(&"was_asked"));
    let comment = pieces.iter().find(|piece| piece.kind == Kind::Comment).unwrap();
    let lines: Vec<_> = words(comment).into_iter().map(|(line, _)| line).collect();
    assert_eq!(lines, [1, 1, 3]);
    let piece = Piece { kind: Kind::Identifier, line: 1, text: "AskedTwice_was".to_owned() };
    let split: Vec<_> = words(&piece).into_iter().map(|(_, word)| word).collect();
    assert_eq!(split, ["asked", "twice", "was"]);
}
