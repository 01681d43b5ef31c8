//! Pieces of HTML: text made safe, tables, figures, and the frame of a page.

use std::fmt::Write as _;

use super::chart::Chart;
use crate::error::Result;

/// A page that this program wrote says so in its head.
pub const GENERATOR: &str = "<meta name=\"generator\" content=\"engraft report\">";

/// `text` as text of a page or of an attribute.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// A whole page. It loads nothing: no script, no font, no picture from elsewhere, and the browser is told to refuse any.
pub fn page(title: &str, body: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n{GENERATOR}\n\
         <title>{}</title>\n<style>\n{}</style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>\n",
        escaped(title),
        include_str!("style.css")
    )
}

/// A figure that stands out, with what it is.
pub fn card(value: &str, what: &str) -> String {
    format!("<div class=\"card\"><b>{}</b><span>{}</span></div>\n", escaped(value), escaped(what))
}

/// A chart with its title and what its curves are: `(colour, name)`.
///
/// # Errors
/// As [`Chart::svg`].
pub fn figure(title: &str, keys: &[(usize, &str)], chart: &Chart, is_wide: bool) -> Result<String> {
    let mut key = String::new();
    for (colour, name) in keys {
        let colour = colour % super::chart::COLOURS;
        let _ = write!(key, "<span><i style=\"background:var(--c{colour})\"></i>{}</span>", escaped(name));
    }
    let class = if is_wide { " class=\"wide\"" } else { "" };
    Ok(format!(
        "<figure{class}><figcaption><b>{}</b>{key}</figcaption>\n{}</figure>\n",
        escaped(title),
        chart.svg()?
    ))
}

/// A column of a table.
#[derive(Debug, Clone, Copy)]
pub struct Column<'a> {
    pub title: &'a str,
    /// Class of its cells: `number`, `text`, `value` or none.
    pub class: &'a str,
}

/// A table with a line of titles.
pub fn table(columns: &[Column], rows: &[Vec<String>]) -> String {
    let mut out = String::from("<div class=\"panel\"><table><thead><tr>");
    for column in columns {
        let _ = write!(out, "<th class=\"{}\">{}</th>", column.class, escaped(column.title));
    }
    out.push_str("</tr></thead><tbody>\n");
    for row in rows {
        out.push_str("<tr>");
        for (column, cell) in columns.iter().zip(row) {
            let _ = write!(out, "<td class=\"{}\">{}</td>", column.class, escaped(cell));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n");
    out
}

/// A table of names and values.
pub fn pairs(rows: &[(&str, String)]) -> String {
    let mut out = String::from("<div class=\"panel\"><table><tbody>\n");
    for (name, value) in rows {
        let _ =
            writeln!(out, "<tr><th>{}</th><td class=\"value\">{}</td></tr>", escaped(name), escaped(value));
    }
    out.push_str("</tbody></table></div>\n");
    out
}

/// Lines to be copied as they are.
pub fn code(text: &str) -> String {
    format!("<pre>{}</pre>\n", escaped(text))
}

/// Seconds since 1970 as `2026-11-23 07:12 UTC`; the date by Howard Hinnant's `civil_from_days`.
pub fn date(time: f64) -> String {
    let seconds = time.max(0.0) as u64;
    let (days, minutes) = ((seconds / 86_400) as i64, seconds / 60 % 1440);
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    format!("{year}-{month:02}-{day:02} {:02}:{:02} UTC", minutes / 60, minutes % 60)
}

/// A number with commas between thousands, without a fraction.
pub fn whole(number: f64) -> String {
    indicatif::HumanCount(number.max(0.0).round() as u64).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_stays_text() {
        assert_eq!(escaped("<script>'&\""), "&lt;script&gt;&#39;&amp;&quot;");
        assert!(!page("</title><script>", "").contains("<script>"));
        let cell = table(&[Column { title: "<b>", class: "" }], &[vec!["<i>".to_owned()]]);
        assert!(!cell.contains("<b>") && !cell.contains("<i>"), "{cell}");
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (time, text) in [
            (0.0, "1970-01-01 00:00 UTC"),
            (951_782_399.0, "2000-02-28 23:59 UTC"),
            (951_782_400.5, "2000-02-29 00:00 UTC"),
            (1_763_881_920.0, "2025-11-23 07:12 UTC"),
            (4_107_542_400.0, "2100-03-01 00:00 UTC"),
        ] {
            assert_eq!(date(time), text);
        }
    }
}
