//! Bounds of texts that may contain what a client sent.

/// Maximum bytes of a status message. It is sent in an HTTP/2 header, which has a limit, and may
/// contain text of a client.
pub const MAX_MESSAGE: usize = 1024;

/// Truncates `text` to `max` bytes at a character boundary, and marks the truncation with `…`.
pub fn truncate(text: &str, max: usize) -> String {
    if text.len() <= max {
        return text.to_owned();
    }
    let end = (0..=max).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    format!("{}…", &text[..end])
}
