//! The picture of a recording: resident memory over time, its phases, and the planned peak.

use std::ops::Range;

use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::{Sample, TraceRecorder, timeline::merged};
use crate::{
    error::{Error, Result},
    observe::phase::Phase,
};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn<T = ()> = std::result::Result<T, DrawingAreaErrorKind<std::io::Error>>;

/// Width and height in pixels; the picture scales with the page.
const SIZE: (u32, u32) = (1060, 460);
/// Left edge of the legend.
const LEGEND: i32 = 830;
/// The strip of phases is this far above the chart, and this high.
const STRIP: (i32, i32) = (6, 12);
/// Samples drawn one by one at most, and pieces of the strip: about one a pixel.
const FINE: usize = 1000;
/// Points of the curves of longer recordings: few enough that steps become an envelope, not a solid block.
const COARSE: usize = 250;

const FILE: RGBColor = RGBColor(217, 217, 217);
const ANONYMOUS: RGBColor = RGBColor(158, 202, 233);
const RESIDENT: RGBColor = RGBColor(31, 78, 121);
const COUNTED: RGBColor = RGBColor(0, 128, 96);
const PLANNED: RGBColor = RGBColor(214, 39, 40);
const GRID: RGBColor = RGBColor(228, 228, 228);
const TEXT: RGBColor = RGBColor(51, 51, 51);

/// MiB below 2 GiB, GiB from there on.
#[derive(Clone, Copy)]
struct Unit {
    bytes: f64,
    name: &'static str,
}

impl Unit {
    fn of(highest: u64) -> Self {
        if highest < 2 << 30 {
            Self { bytes: (1 << 20) as f64, name: "MiB" }
        } else {
            Self { bytes: (1 << 30) as f64, name: "GiB" }
        }
    }

    fn value(self, bytes: u64) -> f64 {
        bytes as f64 / self.bytes
    }

    fn text(self, bytes: u64) -> String {
        let digits = if self.name == "MiB" { 0 } else { 2 };
        format!("{:.digits$} {}", self.value(bytes), self.name)
    }
}

fn colour(phase: Phase) -> RGBColor {
    match phase {
        Phase::Loading => RGBColor(150, 150, 150),
        Phase::Forward => RGBColor(76, 120, 168),
        Phase::Head => RGBColor(245, 166, 35),
        Phase::Backward => RGBColor(228, 87, 86),
        Phase::Update => RGBColor(84, 162, 75),
        Phase::Evaluation => RGBColor(178, 121, 202),
        Phase::Sampling => RGBColor(114, 183, 178),
        Phase::Saving => RGBColor(157, 117, 93),
    }
}

/// The picture as the text of an SVG file; `planned` is the planned peak in bytes.
///
/// # Errors
/// When the picture cannot be drawn, which no recording should bring about.
pub fn svg(recording: &TraceRecorder, planned: u64) -> Result<String> {
    let mut text = String::new();
    let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
    let drawn = draw(&area, recording, planned).and_then(|()| area.present());
    drop(area);
    drawn.map_err(|cause| Error::failed(format!("--memory-trace: the picture cannot be drawn: {cause}")))?;
    Ok(text)
}

fn draw(area: &Area, recording: &TraceRecorder, planned: u64) -> Drawn {
    area.fill(&WHITE)?;
    let count = recording.samples.len();
    let group = if count <= FINE { 1 } else { count.div_ceil(COARSE) };
    let samples = merged(&recording.samples, group);
    let heights = samples.iter().map(|sample| sample.resident.max(sample.counted));
    let highest = heights.chain([planned, 1 << 20]).max().unwrap_or(planned);
    let unit = Unit::of(highest);
    let end = samples.last().map_or(0.0, |sample| sample.seconds).max(1e-3);

    let x_axis = match group {
        1 => "time (s)".to_owned(),
        _ => format!("time (s), each point the highest in {:.1} s", end * group as f64 / count as f64),
    };

    let mut chart = ChartBuilder::on(area)
        .margin_left(10)
        .margin_right(SIZE.0 as i32 - LEGEND + 20)
        .margin_top(56)
        .margin_bottom(10)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..end, 0.0..unit.value(highest) * 1.06)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(TEXT)
        .label_style(("sans-serif", 15).into_font().color(&TEXT))
        .axis_desc_style(("sans-serif", 16).into_font().color(&TEXT))
        .x_desc(x_axis)
        .x_label_formatter(&plain)
        .y_label_formatter(&plain)
        .y_desc(format!("memory ({})", unit.name))
        .draw()?;

    let line = |of: &dyn Fn(&Sample) -> u64| -> Vec<(f64, f64)> {
        samples.iter().map(|sample| (sample.seconds, unit.value(of(sample)))).collect()
    };
    let file = line(&|sample| sample.file);
    let resident = line(&|sample| sample.resident);
    let ground = [(end, 0.0), (0.0, 0.0)];
    let below = |curve: &[(f64, f64)]| {
        let first = curve.first().map(|&(_, height)| (0.0, height));
        curve.iter().copied().chain(ground).chain(first).collect::<Vec<_>>()
    };
    chart.draw_series([Polygon::new(below(&resident), ANONYMOUS), Polygon::new(below(&file), FILE)])?;
    chart.draw_series([PathElement::new(resident, RESIDENT.stroke_width(2))])?;
    chart.draw_series([PathElement::new(line(&|sample| sample.counted), COUNTED.stroke_width(2))])?;
    if planned > 0 {
        let level = unit.value(planned);
        let ends = [(0.0, level), (end, level)];
        chart.draw_series(DashedLineSeries::new(ends, 8, 5, PLANNED.stroke_width(2)))?;
    }
    if let Some(peak) = &recording.peak {
        let top = (peak.seconds, unit.value(peak.resident.max(peak.counted)));
        chart.draw_series([Circle::new(top, 4, RESIDENT.filled())])?;
    }

    let (columns, rows) = chart.plotting_area().get_pixel_range();
    let fine = merged(&recording.samples, count.div_ceil(FINE));
    strip(area, &fine, columns.clone(), rows.start - STRIP.0, end)?;
    title(area, recording, unit, columns.start)?;
    legend(area, recording, planned, unit)
}

/// A number of an axis without needless digits.
fn plain(value: &f64) -> String {
    format!("{}", (value * 1e3).round() / 1e3)
}

/// A bar above the chart with the colour of each phase, on the same axis of time.
fn strip(area: &Area, samples: &[Sample], columns: Range<i32>, bottom: i32, end: f64) -> Drawn {
    let Range { start: left, end: right } = columns;
    let column = |seconds: f64| left + ((right - left) as f64 * seconds / end).round() as i32;
    let mut from = left;
    for (at, sample) in samples.iter().enumerate() {
        let next = samples.get(at + 1);
        if next.is_some_and(|next| next.phase == sample.phase) {
            continue;
        }
        let to = next.map_or(right, |next| column(next.seconds));
        let corners = [(from, bottom - STRIP.1), (to.max(from + 1), bottom)];
        area.draw(&Rectangle::new(corners, colour(sample.phase).filled()))?;
        from = to;
    }
    Ok(())
}

fn title(area: &Area, recording: &TraceRecorder, unit: Unit, left: i32) -> Drawn {
    let Some(peak) = &recording.peak else { return Ok(()) };
    let (what, bytes) = match peak.resident {
        0 => ("Counted", peak.counted),
        resident => ("Resident", resident),
    };
    let text = format!(
        "{what} memory: highest {} in {}, {:.1} s after the start",
        unit.text(bytes),
        peak.phase,
        peak.seconds
    );
    let style = ("sans-serif", 20).into_font().color(&TEXT);
    area.draw(&Text::new(text, (left, 10), style))
}

/// How a legend shows a colour.
#[derive(Clone, Copy)]
enum Mark {
    Box,
    Line,
    Dashes,
}

fn legend(area: &Area, recording: &TraceRecorder, planned: u64, unit: Unit) -> Drawn {
    let mut entries = vec![
        (Mark::Line, RESIDENT, "resident".to_owned()),
        (Mark::Box, ANONYMOUS, "  anonymous".to_owned()),
        (Mark::Box, FILE, "  mapped files".to_owned()),
        (Mark::Line, COUNTED, "counted: heap + arenas".to_owned()),
    ];
    if planned > 0 {
        entries.push((Mark::Dashes, PLANNED, format!("planned peak {}", unit.text(planned))));
    }
    let mut top = 66;
    for (mark, colour, text) in entries {
        entry(area, mark, colour, &text, &mut top)?;
    }
    top += 14;
    label(area, "strip: highest in", LEGEND, top)?;
    top += 22;
    for peak in &recording.phases {
        let height = if peak.resident == 0 { peak.counted } else { peak.resident };
        let text = format!("{}: {}", peak.phase, unit.text(height));
        entry(area, Mark::Box, colour(peak.phase), &text, &mut top)?;
    }
    Ok(())
}

/// One row of the legend around `top`, which then is the next one's.
fn entry(area: &Area, mark: Mark, colour: RGBColor, text: &str, top: &mut i32) -> Drawn {
    let (y, line) = (*top, colour.stroke_width(2));
    let indent = if text.starts_with(' ') { 12 } else { 0 };
    let left = LEGEND + indent;
    match mark {
        Mark::Box => {
            area.draw(&Rectangle::new([(left + 4, y - 6), (left + 20, y + 6)], colour.filled()))?;
        }
        Mark::Line => area.draw(&PathElement::new(vec![(left, y), (left + 24, y)], line))?,
        Mark::Dashes => {
            area.draw(&PathElement::new(vec![(left, y), (left + 9, y)], line))?;
            area.draw(&PathElement::new(vec![(left + 15, y), (left + 24, y)], line))?;
        }
    }
    *top += 22;
    label(area, text.trim_start(), left + 32, y)
}

fn label(area: &Area, text: &str, x: i32, y: i32) -> Drawn {
    let style = ("sans-serif", 15).into_font().color(&TEXT).pos(Pos::new(HPos::Left, VPos::Center));
    area.draw(&Text::new(text.to_owned(), (x, y), style))
}
