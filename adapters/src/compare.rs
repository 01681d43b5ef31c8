//! Low-rank deltas of two adapters, site by site: how long they are, how alike, and how many ranks they use.

use crate::{
    BaseDescription, FoldPart,
    svd::{Matrix, Svd, dot},
};

/// Part of the square of a delta's norm that [`DeltaSize::used`] singular values hold.
const HELD: f64 = 0.99;

/// The delta of an adapter at one site, scales included.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct DeltaSize {
    /// Ranks that it has.
    pub rank: usize,
    /// Frobenius norm: root of the sum of the squares of its elements.
    pub norm: f64,
    /// Square of the norm over the square of the largest singular value: 1 for a delta of one direction.
    pub stable_rank: f64,
    /// Number of singular values that hold 99% of the square of the norm.
    pub used: usize,
}

/// A site that one of two adapters has, or both.
#[derive(Debug, Clone, PartialEq)]
pub struct SiteDifference {
    /// Layer of the base, from 0.
    pub layer: usize,
    /// Index into [`BaseDescription::sites`].
    pub site: usize,
    /// The delta of each; `None` where it has none.
    pub sizes: [Option<DeltaSize>; 2],
    /// Frobenius product of both deltas.
    pub product: f64,
}

impl SiteDifference {
    /// Cosine of the angle between both deltas, taken as vectors; `None` where one is missing or zero.
    pub fn cosine(&self) -> Option<f64> {
        let [Some(first), Some(second)] = self.sizes else { return None };
        let lengths = first.norm * second.norm;
        (lengths > 0.0).then(|| self.product / lengths)
    }
}

/// Compares the deltas of two adapters, by layer and site.
pub fn compare_deltas(parts: [FoldPart; 2], base: &BaseDescription) -> Vec<SiteDifference> {
    let mut found = Vec::new();
    for layer in 0..base.layers {
        for site in 0..base.sites.len() {
            let [first, second] = parts.map(|part| Delta::of(&part, (layer, site), base));
            if first.is_none() && second.is_none() {
                continue;
            }
            let product = first.as_ref().zip(second.as_ref()).map_or(0.0, |(one, other)| one.product(other));
            let sizes = [&first, &second].map(|delta| delta.as_ref().map(Delta::size));
            found.push(SiteDifference { layer, site, sizes, product });
        }
    }
    found
}

/// All deltas of an adapter at a site as one product.
struct Delta {
    /// [outputs, rank], with all scales.
    left: Matrix,
    /// [rank, inputs].
    right: Matrix,
}

impl Delta {
    fn of(part: &FoldPart, place: (usize, usize), base: &BaseDescription) -> Option<Self> {
        let own: Vec<_> = part.set.loras.iter().filter(|lora| (lora.layer, lora.site) == place).collect();
        let rank: usize = own.iter().map(|lora| lora.rank).sum();
        let (inputs, outputs) = (base.sites[place.1].inputs, base.sites[place.1].outputs);
        let (mut left, mut right) = (vec![0.0; outputs * rank], Vec::with_capacity(rank * inputs));
        let mut first = 0;
        for lora in own {
            let tensor = |index: usize| &part.values[part.set.layout.tensors[index].range()];
            let one =
                |vector: Option<usize>, at: usize| vector.map_or(1.0, |index| f64::from(tensor(index)[at]));
            right.extend(tensor(lora.a).iter().map(|&a| f64::from(a)));
            let scale = f64::from(lora.scale) * f64::from(part.factor);
            for (column, row) in part.b(lora).chunks_exact(lora.rank).enumerate() {
                let at = (lora.columns.start + column) * rank + first;
                for (r, &b) in row.iter().enumerate() {
                    left[at + r] = scale * one(lora.e, column) * f64::from(b) * one(lora.d, r);
                }
            }
            first += lora.rank;
        }
        let delta =
            || Self { left: Matrix::new(outputs, rank, left), right: Matrix::new(rank, inputs, right) };
        (rank > 0).then(delta)
    }

    /// Sum over all places of the product of both: `sum (L1^T L2) (R1 R2^T)`, element by element.
    fn product(&self, other: &Self) -> f64 {
        let column = |matrix: &Matrix, at: usize| -> Vec<f64> {
            matrix.values.iter().skip(at).step_by(matrix.cols).copied().collect()
        };
        let row = |matrix: &Matrix, at: usize| matrix.values[at * matrix.cols..][..matrix.cols].to_vec();
        let mut sum = 0.0;
        for i in 0..self.left.cols {
            let (left, right) = (column(&self.left, i), row(&self.right, i));
            for j in 0..other.left.cols {
                sum += dot(&left, &column(&other.left, j)) * dot(&right, &row(&other.right, j));
            }
        }
        sum
    }

    fn size(&self) -> DeltaSize {
        let values = Svd::of_product(&self.left, &self.right).values;
        let square: f64 = values.iter().map(|s| s * s).sum();
        let mut held = 0.0;
        let used = values.iter().take_while(|s| {
            let wanted = held < HELD * square;
            held += *s * *s;
            wanted
        });
        let used = used.count();
        let largest = values.first().copied().unwrap_or(0.0);
        let stable_rank = if largest > 0.0 { square / (largest * largest) } else { 0.0 };
        DeltaSize { rank: self.left.cols, norm: square.sqrt(), stable_rank, used }
    }
}

#[cfg(test)]
mod tests {
    use engraft_util::rng;

    use super::*;
    use crate::{AdapterSet, LoraSpec, Targets, VeraSpec, testing};

    fn drawn(len: usize, seed: u64) -> Vec<f32> {
        (0..len as u64).map(|at| rng::normal(rng::key(&[seed]), at)).collect()
    }

    /// The delta written out, by folding it into zeros.
    fn written_out(part: FoldPart, (layer, site): (usize, usize), base: &BaseDescription) -> Vec<f64> {
        let mut weight = vec![0.0; base.sites[site].inputs * base.sites[site].outputs];
        let folding = crate::Folding::new(vec![part]).unwrap();
        folding.linear(layer, site, &mut weight, &mut vec![0.0; base.sites[site].outputs]);
        weight.into_iter().map(f64::from).collect()
    }

    #[test]
    fn norms_and_cosines_are_those_of_the_deltas_written_out() {
        let base = testing::base();
        let set = |targets: &str, rank| {
            let spec = LoraSpec { rank, targets: targets.parse().unwrap(), ..LoraSpec::default() };
            AdapterSet::new(&spec.into(), &base).unwrap()
        };
        let (one, two) = (set("q,v,mlp.c_proj", 2), set("c_attn,c_fc", 3));
        let (of_one, of_two) = (drawn(one.layout.len, 1), drawn(two.layout.len, 2));
        let parts = [
            FoldPart { set: &one, values: &of_one, factor: -0.5 },
            FoldPart { set: &two, values: &of_two, factor: 1.0 },
        ];
        let found = compare_deltas(parts, &base);
        let places: Vec<_> = found.iter().map(|one| (one.layer, one.site)).collect();
        assert_eq!(places[..4], [(0, 0), (0, 2), (0, 3), (1, 0)]);
        for site in &found {
            let written = parts.map(|part| written_out(part, (site.layer, site.site), &base));
            for (size, written) in site.sizes.iter().zip(&written) {
                let norm = dot(written, written).sqrt();
                assert!((size.map_or(0.0, |size| size.norm) - norm).abs() < 1e-5 * norm.max(1.0));
            }
            assert_eq!(site.cosine().is_some(), site.site == 0);
            if let Some(cosine) = site.cosine() {
                let [one, two] = &written;
                let expected = dot(one, two) / (dot(one, one) * dot(two, two)).sqrt();
                assert!((cosine - expected).abs() < 1e-5 && expected.abs() > 1e-3, "{cosine} {expected}");
            }
        }
        let same = compare_deltas([parts[0], FoldPart { factor: 2.0, ..parts[0] }], &base);
        assert!(same.iter().all(|site| (site.cosine().unwrap() + 1.0).abs() < 1e-12));
    }

    /// Its B has more rows than most sites have columns.
    #[test]
    fn a_vera_on_modules_of_different_widths_is_compared() {
        let base = testing::base();
        let spec = VeraSpec { rank: 3, targets: Targets::AllLinear, ..VeraSpec::default() };
        let set = AdapterSet::new(&spec.into(), &base).unwrap();
        let values = drawn(set.layout.len, 5);
        let part = FoldPart { set: &set, values: &values, factor: 0.5 };
        let found = compare_deltas([part, part], &base);
        assert_eq!(found.len(), base.layers * base.sites.len());
        for site in &found {
            let written = written_out(part, (site.layer, site.site), &base);
            let (norm, size) = (dot(&written, &written).sqrt(), site.sizes[0].unwrap());
            assert!((size.norm - norm).abs() < 1e-5 * norm && norm > 0.1, "{size:?} {norm}");
        }
    }

    #[test]
    fn ranks_that_are_used_are_counted() {
        let base = testing::base();
        let spec = LoraSpec { rank: 3, targets: "attn.c_proj".parse().unwrap(), ..LoraSpec::default() };
        let set = AdapterSet::new(&spec.into(), &base).unwrap();
        let mut values = vec![0.0; set.layout.len];
        // In layer 0 B A = diag(10, 1, 0 ..), so that 100 of 101 are in the first value.
        for (slot, first) in [(set.loras[0].a, 10.0), (set.loras[0].b, 1.0)] {
            let (range, cols) = (set.layout.tensors[slot].range(), set.layout.tensors[slot].shape[1]);
            values[range.start] = first;
            values[range.start + cols + 1] = 1.0;
        }
        let part = FoldPart { set: &set, values: &values, factor: 1.0 };
        let found = compare_deltas([part, part], &base);
        let size = found[0].sizes[0].unwrap();
        assert_eq!((size.rank, size.used), (3, 1));
        assert!((size.stable_rank - 1.01).abs() < 1e-6, "{size:?}");
        assert_eq!(found[1].sizes[0], Some(DeltaSize { rank: 3, ..DeltaSize::default() }));
        assert_eq!(found[1].cosine(), None);
    }
}
