//! Curves over steps as SVG text whose colours are those of the page's style sheet, light or dark.

use plotters::{coord::Shift, prelude::*};

use super::history::Point;
use crate::error::{Error, Result};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = std::result::Result<(), DrawingAreaErrorKind<std::io::Error>>;

/// Curves that one picture can tell apart; more take the colours again.
pub const COLOURS: usize = 8;

/// The backend has whole pixels only: drawn several times as large, curves are smooth.
const SCALE: u32 = 4;
/// A curve keeps at most twice as many points: the lowest and the highest of each part.
const PARTS: usize = 500;

/// Colours that stand for variables of the style sheet, which replace them in the text.
const TEXT: RGBColor = RGBColor(1, 1, 1);
const GRID: RGBColor = RGBColor(1, 1, 2);

fn colour(index: usize) -> RGBColor {
    RGBColor(1, 2, (index % COLOURS) as u8)
}

/// How a curve is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stroke {
    Line,
    /// A thin line in the background.
    Faint,
    /// A line with a dot at each point, for few points.
    Dots,
    Dashes,
}

/// A curve: (step, value) in order of steps. Values that are not finite are left out.
#[derive(Debug, Clone)]
pub struct Curve {
    pub points: Vec<(f64, f64)>,
    pub stroke: Stroke,
    /// Which of the [`COLOURS`].
    pub colour: usize,
}

impl Curve {
    /// One number of each step.
    pub fn of(steps: &[Point], stroke: Stroke, colour: usize, value: impl Fn(&Point) -> f64) -> Self {
        Self { points: steps.iter().map(|point| (point.step, value(point))).collect(), stroke, colour }
    }
}

/// A picture: curves over the same steps.
#[derive(Debug)]
pub struct Chart {
    pub curves: Vec<Curve>,
    /// Whether the axis begins at 0.
    pub from_zero: bool,
    /// Writes a number of the axis.
    pub label: fn(&f64) -> String,
    /// Width and height in pixels of the page, at its usual width.
    pub size: (u32, u32),
}

impl Chart {
    /// The picture as an `<svg>` element.
    ///
    /// # Errors
    /// When it cannot be drawn, which no numbers should bring about.
    pub fn svg(&self) -> Result<String> {
        let mut text = String::new();
        let area = SVGBackend::with_string(&mut text, (self.size.0 * SCALE, self.size.1 * SCALE));
        let area = area.into_drawing_area();
        let drawn = self.draw(&area).and_then(|()| area.present());
        drop(area);
        drawn.map_err(|cause| Error::failed(format!("the report's picture cannot be drawn: {cause}")))?;
        Ok(with_variables(&text))
    }

    fn draw(&self, area: &Area) -> Drawn {
        let curves: Vec<Vec<(f64, f64)>> = self.curves.iter().map(|curve| thinned(&curve.points)).collect();
        let all = || curves.iter().flatten();
        let steps = || all().map(|point| point.0);
        let first = steps().reduce(f64::min).unwrap_or(0.0);
        let last = steps().fold(first, f64::max);
        // One step alone has a width as well.
        let last = if last > first { last } else { first + 1.0 };
        let lowest = all().map(|point| point.1).fold(f64::INFINITY, f64::min);
        let highest = all().map(|point| point.1).fold(f64::NEG_INFINITY, f64::max);
        let (low, high) = bounds(lowest, highest, self.from_zero);
        let px = |pixels: u32| pixels * SCALE;
        let mut chart = ChartBuilder::on(area)
            .margin_top(px(8))
            .margin_right(px(14))
            .x_label_area_size(px(24))
            .y_label_area_size(px(58))
            .build_cartesian_2d(first..last, low..high)?;
        let font = ("sans-serif", f64::from(px(12))).into_font();
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(6)
            .y_labels((self.size.1 / 40) as usize)
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID.stroke_width(SCALE))
            .axis_style(GRID.stroke_width(SCALE))
            .set_all_tick_mark_size(px(3))
            .label_style(font.color(&TEXT))
            .x_label_formatter(&|step: &f64| {
                if step.fract() == 0.0 { format!("{step}") } else { String::new() }
            })
            .y_label_formatter(&self.label)
            .draw()?;
        for (curve, points) in self.curves.iter().zip(curves) {
            let colour = colour(curve.colour);
            match curve.stroke {
                Stroke::Line => {
                    chart.draw_series([PathElement::new(points, colour.stroke_width(2 * SCALE))])?
                }
                Stroke::Faint => {
                    chart.draw_series([PathElement::new(points, colour.mix(0.45).stroke_width(SCALE))])?
                }
                Stroke::Dashes => {
                    let style = colour.stroke_width(3 * SCALE / 2);
                    chart.draw_series(DashedLineSeries::new(points, px(6), px(4), style))?
                }
                Stroke::Dots => {
                    chart.draw_series([PathElement::new(points.clone(), colour.stroke_width(2 * SCALE))])?;
                    let dot = |at: (f64, f64)| Circle::new(at, px(4), colour.filled());
                    chart.draw_series(points.into_iter().map(dot))?
                }
            };
        }
        Ok(())
    }
}

/// Bounds of an axis with some room; those of one value alone are around it.
fn bounds(lowest: f64, highest: f64, from_zero: bool) -> (f64, f64) {
    if !lowest.is_finite() || !highest.is_finite() {
        return (0.0, 1.0);
    }
    let low = if from_zero { lowest.min(0.0) } else { lowest };
    let room = match highest - low {
        room if room > 0.0 => room * 0.06,
        _ => highest.abs().max(1e-9) * 0.1,
    };
    (if from_zero && low == 0.0 { 0.0 } else { low - room }, highest + room)
}

/// The finite points; of many the lowest and the highest of each part, in their order.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let finite: Vec<_> = points.iter().copied().filter(|point| point.1.is_finite()).collect();
    if finite.len() <= 2 * PARTS {
        return finite;
    }
    let part = |part: &[(f64, f64)]| {
        let by_value = |a: &(f64, f64), b: &(f64, f64)| a.1.total_cmp(&b.1);
        let ends = part.iter().copied().min_by(by_value).zip(part.iter().copied().max_by(by_value));
        let mut ends: Vec<_> = ends.map(|(low, high)| vec![low, high]).unwrap_or_default();
        ends.sort_by(|a, b| a.0.total_cmp(&b.0));
        ends.dedup();
        ends
    };
    let ends = [finite[0]].into_iter().chain(finite.chunks(finite.len().div_ceil(PARTS)).flat_map(part));
    let mut kept: Vec<_> = ends.chain(finite.last().copied()).collect();
    kept.dedup();
    kept
}

/// The text with variables of the style sheet in the place of colours, and a size that follows the page.
fn with_variables(svg: &str) -> String {
    let mut text = svg.to_owned();
    if let (Some(from), Some(to)) = (text.find(" width="), text.find(" viewBox=")) {
        text.replace_range(from..to, " role=\"img\"");
    }
    let written = |colour: RGBColor| format!("#{:02X}{:02X}{:02X}", colour.0, colour.1, colour.2);
    let names = [(TEXT, "var(--muted)".to_owned()), (GRID, "var(--grid)".to_owned())];
    let curves = (0..COLOURS).map(|index| (colour(index), format!("var(--c{index})")));
    for (colour, name) in names.into_iter().chain(curves) {
        text = text.replace(&written(colour), &name);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: Vec<(f64, f64)>) -> Chart {
        let curve = |stroke, colour| Curve { points: points.clone(), stroke, colour };
        Chart {
            curves: vec![curve(Stroke::Line, 0), curve(Stroke::Dots, 1), curve(Stroke::Faint, 9)],
            from_zero: true,
            label: |value| format!("{value}"),
            size: (400, 200),
        }
    }

    #[test]
    fn every_colour_is_one_of_the_style_sheet() {
        let svg = chart(vec![(1.0, 2.0), (2.0, 3.0), (3.0, f64::NAN)]).svg().unwrap();
        assert!(
            svg.contains("var(--c0)") && svg.contains("var(--c1)") && svg.contains("var(--muted)"),
            "{svg}"
        );
        assert!(!svg.contains('#'), "a fixed colour: {svg}");
        assert!(svg.starts_with("<svg role=\"img\" viewBox=\"0 0 1600 800\""), "{}", &svg[..80]);
    }

    #[test]
    fn nothing_one_point_and_equal_values_are_drawn() {
        for points in [vec![], vec![(5.0, 1.0)], vec![(1.0, 0.0), (2.0, 0.0)], vec![(1.0, f64::INFINITY)]] {
            assert!(chart(points).svg().is_ok());
        }
        assert_eq!(bounds(2.0, 4.0, true), (0.0, 4.24));
        assert!(bounds(3.0, 3.0, false).0 < 3.0 && bounds(3.0, 3.0, false).1 > 3.0);
    }

    #[test]
    fn many_points_keep_their_extremes_and_ends() {
        let mut points: Vec<(f64, f64)> = (0..100_000).map(|step| (f64::from(step), 1.0)).collect();
        points[54_321].1 = 9.0;
        points[54_322].1 = -9.0;
        let kept = thinned(&points);
        assert!(kept.len() <= 2 * PARTS + 2, "{}", kept.len());
        assert!(kept.contains(&(54_321.0, 9.0)) && kept.contains(&(54_322.0, -9.0)));
        assert_eq!((kept[0].0, kept[kept.len() - 1].0), (0.0, 99_999.0));
        assert!(kept.is_sorted_by(|a, b| a.0 < b.0));
    }
}
