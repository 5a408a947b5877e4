//! The figures as one SVG: a chart for each question, lines for what is measured side by side.

use std::fmt::Write as _;

use crate::report::{Report, Series};
use crate::stats::{bytes, digits, time};

/// A chart: which series it shows, and what its axes mean.
struct Chart {
    id: &'static str,
    title: &'static str,
    x: Axis,
    y: Axis,
}

#[derive(Clone, Copy)]
enum Axis {
    /// Logarithmic, bytes to base 2.
    LogBytes(&'static str),
    /// Logarithmic, to base 10.
    Log(&'static str, fn(f64) -> String),
    /// From 0.
    Linear(&'static str, fn(f64) -> String),
}

const CHARTS: [Chart; 6] = [
    Chart {
        id: "sizes",
        title: "cost against volume size, 1,000 changes",
        x: Axis::LogBytes("volume size"),
        y: Axis::Log("time", time),
    },
    Chart {
        id: "delta",
        title: "delta, 10 GiB, 2,621 blocks changed",
        x: Axis::Linear("run", digits),
        y: Axis::Log("time", time),
    },
    Chart {
        id: "cut",
        title: "CreateSnapshot against extents",
        x: Axis::Log("extents of the volume", count),
        y: Axis::Log("time", time),
    },
    Chart {
        id: "stall",
        title: "longest stall of a 4 KiB writer",
        x: Axis::Log("extents of the volume", count),
        y: Axis::Log("stall", time),
    },
    Chart {
        id: "memory",
        title: "memory while streaming",
        x: Axis::Linear("seconds", digits),
        y: Axis::Linear("resident", memory),
    },
    Chart {
        id: "fio",
        title: "volume / plain loop device, by pattern",
        x: Axis::Linear("pattern (order of the table)", digits),
        y: Axis::Linear("ratio of the throughputs", digits),
    },
];

const COLOURS: [&str; 7] =
    ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf"];

const WIDTH: f64 = 680.0;
const HEIGHT: f64 = 330.0;
/// Room for titles and numbers around a chart: left, right, top, bottom.
const LEFT: f64 = 74.0;
const RIGHT: f64 = 270.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 46.0;

fn count(number: f64) -> String {
    crate::stats::grouped(number.round() as i64)
}

fn memory(number: f64) -> String {
    bytes(number as u64)
}

impl Axis {
    fn title(self) -> &'static str {
        match self {
            Self::LogBytes(title) | Self::Log(title, _) | Self::Linear(title, _) => title,
        }
    }

    fn write(self, value: f64) -> String {
        match self {
            Self::LogBytes(_) => bytes(value as u64),
            Self::Log(_, write) | Self::Linear(_, write) => write(value),
        }
    }

    /// Whether a value has a place: nothing lies at 0 of a logarithm.
    fn has(self, value: f64) -> bool {
        matches!(self, Self::Linear(..)) || value > 0.0
    }

    /// Where a value lies, on the axis's own scale.
    fn place(self, value: f64) -> f64 {
        match self {
            Self::LogBytes(_) => value.max(1.0).log2(),
            Self::Log(..) => value.max(1e-9).log10(),
            Self::Linear(..) => value,
        }
    }

    fn value(self, place: f64) -> f64 {
        match self {
            Self::LogBytes(_) => place.exp2(),
            Self::Log(..) => 10f64.powf(place),
            Self::Linear(..) => place,
        }
    }

    /// The ends of the axis on its scale, and where it is marked.
    fn range(self, values: &[f64]) -> (f64, f64, Vec<f64>) {
        let places =
            || values.iter().filter(|value| self.has(**value)).map(|value| self.place(*value));
        let (low, high) = (places().fold(f64::MAX, f64::min), places().fold(f64::MIN, f64::max));
        let (low, high, step) = match self {
            Self::LogBytes(_) => (low.floor(), high.ceil(), 2.0),
            Self::Log(..) => (low.floor(), high.ceil(), 1.0),
            Self::Linear(..) => {
                let step = 10f64.powf(high.max(1e-9).log10().floor());
                let step = if high / step < 2.5 { step / 4.0 } else { step };
                (0.0, (high * 1.02 / step).ceil() * step, step)
            }
        };
        let high = if high > low { high } else { low + step };
        let marks = ((high - low) / step).floor() as usize;
        (low, high, (0..=marks).map(|mark| low + mark as f64 * step).collect())
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn label(svg: &mut String, x: f64, y: f64, anchor: &str, text: &str) {
    let text = escape(text);
    let _ = writeln!(svg, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{text}</text>"#);
}

/// Draws a chart with its upper left corner at 0, 0.
fn draw(svg: &mut String, chart: &Chart, series: &[&Series]) {
    let values = |pick: fn(&(f64, f64)) -> f64| -> Vec<f64> {
        series.iter().flat_map(|line| line.points.iter().map(pick)).collect()
    };
    let (x_low, x_high, x_marks) = chart.x.range(&values(|point| point.0));
    let (y_low, y_high, y_marks) = chart.y.range(&values(|point| point.1));
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    let x_at = |place: f64| LEFT + (place - x_low) / (x_high - x_low) * (right - LEFT);
    let y_at = |place: f64| bottom - (place - y_low) / (y_high - y_low) * (bottom - TOP);
    let _ = writeln!(
        svg,
        r#"<text x="{LEFT}" y="20" font-weight="bold" font-size="14">{}</text>"#,
        escape(chart.title)
    );
    for mark in y_marks {
        let y = y_at(mark);
        let _ = writeln!(svg, r##"<path d="M{LEFT} {y:.1}H{right}" stroke="#ddd"/>"##);
        label(svg, LEFT - 6.0, y + 4.0, "end", &chart.y.write(chart.y.value(mark)));
    }
    for mark in x_marks {
        let x = x_at(mark);
        let _ = writeln!(svg, r##"<path d="M{x:.1} {TOP}V{bottom}" stroke="#eee"/>"##);
        label(svg, x, bottom + 16.0, "middle", &chart.x.write(chart.x.value(mark)));
    }
    label(svg, (LEFT + right) / 2.0, HEIGHT - 10.0, "middle", chart.x.title());
    label(svg, 4.0, TOP - 4.0, "start", chart.y.title());
    for (number, line) in series.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        let places: Vec<(f64, f64)> = line
            .points
            .iter()
            .filter(|(x, y)| chart.x.has(*x) && chart.y.has(*y))
            .map(|(x, y)| (x_at(chart.x.place(*x)), y_at(chart.y.place(*y))))
            .collect();
        let path: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(
            svg,
            r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="1.8"/>"#,
            path.join(" ")
        );
        if places.len() <= 40 {
            for (x, y) in places {
                let _ =
                    writeln!(svg, r#"<circle cx="{x:.1}" cy="{y:.1}" r="2.6" fill="{colour}"/>"#);
            }
        }
        let y = TOP + 8.0 + number as f64 * 18.0;
        let _ = writeln!(
            svg,
            r#"<path d="M{:.1} {y:.1}h16" stroke="{colour}" stroke-width="3"/>"#,
            right + 10.0
        );
        label(svg, right + 30.0, y + 4.0, "start", &line.name);
    }
}

/// All charts that there are series for, two in a row.
pub fn svg(report: &Report) -> String {
    let mut body = String::new();
    let mut drawn: u32 = 0;
    for chart in &CHARTS {
        let series: Vec<&Series> = report
            .series
            .iter()
            .filter(|line| line.chart == chart.id && !line.points.is_empty())
            .collect();
        if series.is_empty() {
            continue;
        }
        let (x, y) = (f64::from(drawn % 2) * WIDTH, f64::from(drawn / 2) * HEIGHT);
        let _ = writeln!(body, r#"<g transform="translate({x} {y})">"#);
        draw(&mut body, chart, &series);
        body.push_str("</g>\n");
        drawn += 1;
    }
    let height = f64::from(drawn.div_ceil(2)) * HEIGHT + 24.0;
    let warning = if report.quick { "QUICK, means nothing: " } else { "" };
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{:.0}\" height=\"{height:.0}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{body}\
         <text x=\"8\" y=\"{:.0}\">{warning}{}</text>\n</svg>\n",
        WIDTH * 2.0,
        height - 8.0,
        escape(&report.machine)
    )
}
