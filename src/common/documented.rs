//! Reads the tables of docs/, for tests that compare them with the code.

/// The cells of each row whose first cell is code. An empty cell precedes the first one.
pub fn rows(page: &str) -> Vec<Vec<&str>> {
    let rows = page.lines().filter(|line| line.starts_with("| `"));
    rows.map(|line| line.split('|').map(str::trim).collect()).collect()
}

/// The row with this label.
///
/// # Panics
/// No row has it.
#[allow(clippy::panic)] // For tests.
pub fn row<'p>(page: &'p str, label: &str) -> Vec<&'p str> {
    let first = format!("`{label}`");
    let row = rows(page).into_iter().find(|row| row[1] == first);
    row.unwrap_or_else(|| panic!("{label} has no row in the documentation"))
}
