//! The report of a run: as text, as JSON and as JUnit XML. All parts of it that a driver chose are
//! made printable.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::figures::{Figures, REFERENCE};
use super::rules::{Finding, Map, Rule, Severity};
use super::run::{Ended, Judged, Judgment, Run};
use crate::client::format::cell as printable;

/// Characters of a map.
const CELLS: u64 = 64;

pub fn list(rules: &[Rule]) -> String {
    let mut text = String::new();
    for rule in rules {
        let _ = writeln!(text, "{:<22} {:<7} {}", rule.id, rule.severity.name(), rule.sentence);
    }
    text
}

/// The command that judges a rule again.
fn again(command: &str, judged: &Judged<'_>) -> String {
    format!("{command} --focus {}", judged.rule.id)
}

/// `command` runs the same again.
pub fn text(run: &Run<'_>, command: &str) -> String {
    let mut text = String::new();
    let driver = format!("{} {}", run.driver.name, run.driver.version);
    let (driver, seconds) = (printable(driver.trim_end()), run.time.as_secs_f64());
    let _ = writeln!(text, "driver {driver}, CSI v1.13, seed {}, {seconds:.1} s", run.seed);
    let _ = writeln!(text, "{}", counts(run));
    for judged in &run.judged {
        if let Judgment::Failed(finding) = &judged.result {
            text += &failure(judged, finding, &again(command, judged));
        }
    }
    text += &skipped(run);
    if let Some(own) = run.figures {
        text += &figures(own);
    }
    text
}

/// The skipped rules, those with the same reason together.
fn skipped(run: &Run<'_>) -> String {
    let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
    for judged in &run.judged {
        let Judgment::Skipped(reason) = &judged.result else { continue };
        match reasons.iter_mut().find(|(known, _)| known == reason) {
            Some((_, ids)) => ids.push(judged.rule.id),
            None => reasons.push((reason, vec![judged.rule.id])),
        }
    }
    let mut text = String::from(if reasons.is_empty() { "" } else { "\nskipped:\n" });
    for (reason, ids) in reasons {
        let _ = writeln!(text, "  {}: {}", ids.join(", "), printable(reason));
    }
    text
}

fn counts(run: &Run<'_>) -> String {
    let failed = |severity| run.failed(severity);
    let mut text = format!(
        "{} passed, {} failed (MUST {}, data {}), {} advice, {} skipped",
        run.passed(),
        failed(Severity::Must) + failed(Severity::Data),
        failed(Severity::Must),
        failed(Severity::Data),
        failed(Severity::Advice),
        run.skipped()
    );
    if run.ended == Ended::Stopped {
        text += "; stopped before all rules were judged";
    }
    text
}

fn failure(judged: &Judged<'_>, finding: &Finding, again: &str) -> String {
    let Rule { id, severity, sentence, source, consequence, check: _ } = judged.rule;
    let word = if *severity == Severity::Advice { "ADVICE" } else { "FAIL" };
    let mut text = format!("\n{word} {id} ({}): {sentence}\n", severity.name());
    let lines = [
        ("source", (*source).to_owned()),
        ("call", finding.call.clone()),
        ("expected", finding.expected.clone()),
        ("seen", finding.seen.clone()),
        ("means", (*consequence).to_owned()),
        ("again", again.to_owned()),
    ];
    for (label, line) in lines {
        let _ = writeln!(text, "  {label:<9} {}", printable(&line));
    }
    if let Some(map) = &finding.map {
        let _ = writeln!(text, "  map       {}", drawn(map));
        let each = map.size.div_ceil(CELLS);
        let _ =
            writeln!(text, "            {each} bytes each: # returned, ! missing, . not needed");
    }
    text
}

/// One character for each part of the volume.
fn drawn(map: &Map) -> String {
    let each = map.size.div_ceil(CELLS).max(1);
    let has = |ranges: &super::content::Ranges, start: u64| {
        !ranges.within(start..start + each).is_empty()
    };
    (0..map.size.div_ceil(each))
        .map(|cell| match (has(&map.missing, cell * each), has(&map.needed, cell * each)) {
            (true, _) => '!',
            (false, true) => '#',
            (false, false) => '.',
        })
        .collect()
}

/// Next to those of this project's driver.
fn figures(own: Figures) -> String {
    let mut text = format!("\n{:<33} {:>12} {:>12}\n", "figures", "driver", "csi-loopback");
    let millis = |figures: &Figures| figures.first_message.as_secs_f64() * 1000.0;
    let both = [&own, &REFERENCE];
    for (label, [ours, theirs]) in [
        ("tuples a second", both.map(|one| format!("{:.0}", one.rate))),
        ("first message after", both.map(|one| format!("{:.1} ms", millis(one)))),
        (
            "bytes of the delta that differ",
            both.map(|one| format!("{:.1} %", one.precision * 100.0)),
        ),
        ("granularity in bytes", both.map(|one| one.granularity.to_string())),
    ] {
        let _ = writeln!(text, "  {label:<31} {ours:>12} {theirs:>12}");
    }
    text
}

/// # Errors
/// The document cannot be encoded.
pub fn json(run: &Run<'_>, command: &str) -> anyhow::Result<String> {
    let rules: Vec<Value> = run.judged.iter().map(|judged| entry(judged, command)).collect();
    let values = |figures: Figures| {
        json!({
            "tuplesPerSecond": figures.rate,
            "firstMessageSeconds": figures.first_message.as_secs_f64(),
            "precision": figures.precision,
            "granularityBytes": figures.granularity,
        })
    };
    let document = json!({
        "driver": { "name": run.driver.name, "version": run.driver.version },
        "seed": run.seed,
        "seconds": run.time.as_secs_f64(),
        "complete": run.ended == Ended::Done,
        "passed": run.passed(),
        "failed": { "must": run.failed(Severity::Must), "data": run.failed(Severity::Data) },
        "advice": run.failed(Severity::Advice),
        "skipped": run.skipped(),
        "rules": rules,
        "figures": run.figures.map(values),
        "figuresOfCsiLoopback": values(REFERENCE),
        "notRemoved": run.remaining,
    });
    Ok(serde_json::to_string_pretty(&document)? + "\n")
}

fn entry(judged: &Judged<'_>, command: &str) -> Value {
    let Rule { id, severity, sentence, source, consequence, check: _ } = judged.rule;
    let mut value = json!({
        "id": id,
        "severity": severity.name(),
        "sentence": sentence,
        "source": source,
        "seconds": judged.time.as_secs_f64(),
    });
    match &judged.result {
        Judgment::Passed => value["result"] = json!("passed"),
        Judgment::Skipped(reason) => {
            value["result"] = json!("skipped");
            value["reason"] = json!(reason);
        }
        Judgment::Failed(finding) => {
            value["result"] = json!("failed");
            value["consequence"] = json!(consequence);
            value["call"] = json!(finding.call);
            value["expected"] = json!(finding.expected);
            value["seen"] = json!(finding.seen);
            value["again"] = json!(again(command, judged));
            let ranges = finding.map.iter().flat_map(|map| map.missing.0.iter());
            let range = |range: &std::ops::Range<u64>| json!({ "offsetBytes": range.start, "lengthBytes": range.end - range.start });
            value["missing"] = ranges.map(range).collect();
        }
    }
    value
}

/// Violated advice is a skipped test: a CI does not fail.
pub fn junit(run: &Run<'_>, command: &str) -> String {
    let failed = run.failed(Severity::Must) + run.failed(Severity::Data);
    let mut text = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let _ = writeln!(
        text,
        "<testsuite name=\"conformance of {} {}\" tests=\"{}\" failures=\"{failed}\" skipped=\"{}\" time=\"{:.3}\">",
        escaped(&run.driver.name),
        escaped(&run.driver.version),
        run.judged.len(),
        run.skipped() + run.failed(Severity::Advice),
        run.time.as_secs_f64()
    );
    for judged in &run.judged {
        let Rule { id, severity, sentence, .. } = judged.rule;
        let class = severity.name();
        let time = judged.time.as_secs_f64();
        let _ = write!(text, "  <testcase classname=\"{class}\" name=\"{id}\" time=\"{time:.3}\"");
        let _ = match &judged.result {
            Judgment::Passed => writeln!(text, "/>"),
            Judgment::Skipped(reason) => {
                writeln!(text, "><skipped message=\"{}\"/></testcase>", escaped(reason))
            }
            Judgment::Failed(finding) => {
                let body = escaped(&failure(judged, finding, &again(command, judged)));
                let message = escaped(sentence);
                let kind = if *severity == Severity::Advice { "skipped" } else { "failure" };
                writeln!(text, "><{kind} message=\"{message}\">{body}</{kind}></testcase>")
            }
        };
    }
    text + "</testsuite>\n"
}

fn escaped(text: &str) -> String {
    let lines = text.split('\n').map(printable).collect::<Vec<_>>().join("\n");
    lines.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
// One range of bytes, not its numbers.
#[expect(clippy::single_range_in_vec_init)]
mod tests {
    use std::time::Duration;

    use super::super::content::Ranges;
    use super::super::door::About;
    use super::*;

    #[test]
    fn the_map_shows_needed_and_missing_parts() {
        let map = Map {
            size: 64 << 20,
            needed: Ranges(vec![0..4096, 10 << 20..12 << 20, (64 << 20) - 512..64 << 20]),
            missing: Ranges(vec![11 << 20..(11 << 20) + 512]),
        };
        let text = drawn(&map);
        assert_eq!(text.len(), 64);
        assert!(text.starts_with("#.........#!.") && text.ends_with(".#"), "{text}");
    }

    #[test]
    fn a_report_is_valid_and_shows_the_next_command() {
        let rules = super::super::rules::all();
        let finding = Finding { seen: "<\u{1b}[31m>".to_owned(), ..Finding::default() };
        let judged = |at: usize, result| Judged { rule: &rules[at], result, time: Duration::ZERO };
        let run = Run {
            driver: About { name: "a<b".to_owned(), version: "1".to_owned() },
            seed: 7,
            judged: vec![
                judged(0, Judgment::Passed),
                judged(1, Judgment::Failed(Box::new(finding))),
                judged(2, Judgment::Skipped("a \"reason\"".to_owned())),
            ],
            ended: Ended::Done,
            time: Duration::from_secs(1),
            figures: Some(Figures { granularity: 65536, ..REFERENCE }),
            remaining: Vec::new(),
        };
        let command = "csi-loopback conformance --endpoint unix:///a --seed 7";
        let again = format!("{command} --focus {}", rules[1].id);
        let shown = text(&run, command);
        assert!(shown.contains(&again) && !shown.contains('\u{1b}'), "{shown}");
        let granularity = shown.lines().last().unwrap();
        assert!(granularity.ends_with("       65536         8192"), "{shown}");
        let document: Value = serde_json::from_str(&json(&run, command).unwrap()).unwrap();
        assert_eq!(document["rules"][1]["again"], again);
        let xml = junit(&run, command);
        assert!(xml.contains("a&lt;b") && !xml.contains('\u{1b}'), "{xml}");
        assert!(xml.contains("failures=\"1\" skipped=\"1\""), "{xml}");
    }
}
