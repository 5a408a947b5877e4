//! How many bytes of each part of a volume a listing contains. The memory is the same for 1 GiB and
//! for 16 TiB.

use storage::Extent;

/// Parts that a volume is counted in.
const PARTS: usize = 8192;

/// The listed bytes of a volume, by part.
#[derive(Debug, Clone)]
pub struct Cells {
    capacity: u64,
    counts: Vec<u64>,
    bytes: u64,
}

/// How much of a cell is listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    None,
    Under1,
    Under10,
    Under50,
    Most,
    /// The cell is beyond the end of the volume.
    Outside,
}

impl Level {
    /// The levels of a legend, with their meaning.
    pub const LEGEND: [(Self, &str); 5] = [
        (Self::None, "none"),
        (Self::Under1, "under 1 %"),
        (Self::Under10, "under 10 %"),
        (Self::Under50, "under 50 %"),
        (Self::Most, "50 % and more"),
    ];

    fn of(bytes: u64, cell: u64) -> Self {
        let bytes = u128::from(bytes);
        let reaches = |percent: u128| bytes * 100 >= u128::from(cell) * percent;
        match bytes {
            0 => Self::None,
            _ if reaches(50) => Self::Most,
            _ if reaches(10) => Self::Under50,
            _ if reaches(1) => Self::Under10,
            _ => Self::Under1,
        }
    }

    pub const fn symbol(self) -> char {
        match self {
            Self::None => '·',
            Self::Under1 => '░',
            Self::Under10 => '▒',
            Self::Under50 => '▓',
            Self::Most => '█',
            Self::Outside => ' ',
        }
    }
}

impl Cells {
    /// `capacity`: bytes of the volume, at least 1.
    pub fn new(capacity: u64) -> Self {
        Self { capacity: capacity.max(1), counts: vec![0; PARTS], bytes: 0 }
    }

    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// All listed bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds an extent; bytes beyond the capacity are ignored.
    pub fn add(&mut self, extent: Extent) {
        let end = extent.end().min(self.capacity);
        let mut at = extent.offset;
        while at < end {
            let part = scaled(at, PARTS as u64, self.capacity);
            let next = start(part + 1, PARTS as u64, self.capacity).min(end).max(at + 1);
            if let Some(count) =
                usize::try_from(part).ok().and_then(|part| self.counts.get_mut(part))
            {
                *count += next - at;
            }
            self.bytes += next - at;
            at = next;
        }
    }

    /// The listed bytes of `width` cells that divide `scale` bytes; `None` beyond the end of the
    /// volume.
    pub fn columns(&self, scale: u64, width: usize) -> Vec<Option<u64>> {
        let scale = scale.max(self.capacity);
        let cells = width.max(1) as u64;
        let mut columns: Vec<Option<u64>> = (0..cells)
            .map(|cell| (start(cell, cells, scale) < self.capacity).then_some(0))
            .collect();
        for (part, count) in self.counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            // A part lies in the cell that contains its middle.
            let middle = start(2 * part as u64 + 1, 2 * PARTS as u64, self.capacity);
            let cell = usize::try_from(scaled(middle, cells, scale)).unwrap_or(0);
            if let Some(column) = columns.get_mut(cell) {
                *column = Some(column.unwrap_or(0) + count);
            }
        }
        columns
    }

    /// The levels of these cells.
    pub fn levels(&self, scale: u64, width: usize) -> Vec<Level> {
        let cell = (scale.max(self.capacity) / width.max(1) as u64).max(1);
        let columns = self.columns(scale, width).into_iter();
        columns.map(|bytes| bytes.map_or(Level::Outside, |bytes| Level::of(bytes, cell))).collect()
    }

    /// The volume as one line.
    pub fn strip(&self, width: usize) -> String {
        self.levels(self.capacity, width).into_iter().map(Level::symbol).collect()
    }
}

/// Which of `cells` cells of `whole` bytes contains the byte `at`.
fn scaled(at: u64, cells: u64, whole: u64) -> u64 {
    let cell = u128::from(at) * u128::from(cells) / u128::from(whole);
    u64::try_from(cell).unwrap_or(u64::MAX).min(cells - 1)
}

/// The first byte of a cell.
fn start(cell: u64, cells: u64, whole: u64) -> u64 {
    let start = (u128::from(cell) * u128::from(whole)).div_ceil(u128::from(cells));
    u64::try_from(start).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const TIB: u64 = 1 << 40;

    fn cells(capacity: u64, extents: &[(u64, u64)]) -> Cells {
        let mut cells = Cells::new(capacity);
        for &(offset, length) in extents {
            cells.add(Extent { offset, length });
        }
        cells
    }

    #[test]
    fn one_block_is_visible_in_1_gib_and_in_16_tib() {
        for capacity in [GIB, 16 * TIB] {
            let strip = cells(capacity, &[(capacity / 2, 4096)]).strip(64);
            let expected = format!("{}░{}", "·".repeat(32), "·".repeat(31));
            assert_eq!(strip, expected);
        }
    }

    #[test]
    fn a_cell_shows_how_much_of_it_is_listed() {
        let cell = GIB / 4;
        let strip = cells(GIB, &[(0, cell), (cell, cell / 4), (2 * cell, cell / 50)]).strip(4);
        assert_eq!(strip, "█▓▒·");
    }

    #[test]
    fn every_byte_is_counted_once() {
        for capacity in [1, 4096, 12_288, GIB + 4096, 16 * TIB, u64::MAX] {
            let all = cells(capacity, &[(0, capacity)]);
            assert_eq!(all.bytes(), capacity);
            for width in [1, 7, 64, 512] {
                let sum: u64 = all.columns(capacity, width).into_iter().flatten().sum();
                assert_eq!(sum, capacity, "{capacity} {width}");
            }
        }
    }

    #[test]
    fn a_smaller_volume_takes_less_of_a_common_scale() {
        let small = cells(GIB, &[(0, GIB)]);
        let levels = small.levels(4 * GIB, 8);
        assert_eq!(&levels[..2], [Level::Most; 2]);
        assert_eq!(&levels[2..], [Level::Outside; 6]);
    }
}
