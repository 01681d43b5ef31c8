//! CUDA side: the five launches, and how a layer becomes their arguments.

use super::device_scratch::{Parts, Sizes, TILE, share, shares};
use super::{Buffers, Group, Layer, MOST_DELTAS, Site};
use crate::{
    device::{
        DType, View, ViewMut,
        cuda::{Argument, Gpu, Grid, Image, arguments, image, named},
    },
    kernels::{
        activation,
        attention::{
            Shape,
            cuda::{RawHeads, raw_shape},
            device_scratch::{KEYS, key_shares},
        },
        layernorm::Norm,
        matmul::{self, Arithmetic},
    },
};

static IMAGE: Image = image!("decode_layer");

/// A delta in the layout of tile.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
struct RawDelta {
    a: u64,
    b: u64,
    scale: f32,
    first: i32,
    columns: i32,
    row: u8,
    rows: u8,
    rank: u16,
}

/// A gain or a bias in the layout of rows.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
struct RawParameter {
    frozen: u64,
    trained: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Open {
    parts: u64,
    xa: u64,
    bias: u64,
    splits: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct RawCache {
    k: u64,
    v: u64,
    row: i64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct RawRows {
    counts: u64,
    slots: u64,
    first: i32,
    n: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct RawSizes {
    n: i32,
    inputs: i32,
    cols: i32,
    size: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Joint {
    parts: u64,
    xa: u64,
    tickets: u64,
}

fn int(size: usize) -> i32 {
    i32::try_from(size).unwrap_or(-1)
}

fn parameter(view: View) -> Argument {
    let trained = view.dtype() == DType::F32;
    let [frozen, trained] = [!trained, trained].map(|own| if own { view.address() } else { 0 });
    Argument::structure(RawParameter { frozen, trained })
}

impl Site<'_> {
    /// Its deltas, and none up to the most that the kernels take.
    fn raw_deltas(&self) -> Vec<Argument> {
        let mut all = vec![Argument::structure([0u64; 4]); MOST_DELTAS];
        for (to, of) in all.iter_mut().zip(&self.deltas) {
            let delta = of.delta;
            let (rank, columns) = (delta.rank, delta.columns.len());
            *to = Argument::structure(RawDelta {
                a: of.values.slice(delta.a, rank * self.weight.rows).address(),
                b: of.values.slice(delta.b, rank * columns).address(),
                scale: delta.scale,
                first: int(delta.columns.start),
                columns: int(columns),
                row: of.first as u8,
                rows: of.rows as u8,
                rank: rank as u16,
            });
        }
        all
    }
}

/// A layer, and where its scratch is.
struct Launches<'l, 'a> {
    gpu: &'static Gpu,
    layer: &'l Layer<'a>,
    dtype: DType,
    n: usize,
    parts: Parts,
    scratch: u64,
    tickets: u64,
}

pub fn forward(gpu: &'static Gpu, layer: &Layer, x: View, to: Buffers) {
    let (c, n) = (layer.norms[0].gain.len(), layer.groups.iter().map(|group| group.rows).sum());
    let [c_attn, attn_proj, c_fc, mlp_proj] = layer.sites.each_ref().map(|site| site.weight);
    let f = c_fc.cols;
    let shapes = [(c_attn, c, 3 * c), (attn_proj, c, c), (c_fc, c, f), (mlp_proj, f, c)];
    for (weight, rows, cols) in shapes {
        matmul::cuda::check_type(weight, x.dtype());
        assert!(
            (weight.rows, weight.cols) == (rows, cols) && weight.data.len() >= rows * cols,
            "a layer's shapes"
        );
    }
    let Buffers { cache: (mut k, mut v), mixed, middle, y, tickets } = to;
    let all = [&mixed, &middle, &y].into_iter().all(|to| to.len() == n * c && to.dtype() == x.dtype());
    assert!(x.len() == n * c && all && k.len() == v.len() && k.dtype() == x.dtype(), "a layer's shapes");
    assert!(tickets.len() >= super::device_scratch::tickets(n, c, layer.heads), "a layer's tickets");
    let prefix = layer.groups.iter().filter_map(|group| group.prefix).map(|(_, p)| p).max().unwrap_or(0);
    let ranks = layer.sites.iter().map(Site::ranks).max().unwrap_or(0);
    let keys = prefix + layer.capacity;
    let parts = Parts::of(Sizes { n, width: c, inner: f, heads: layer.heads, keys, ranks });
    gpu.scratch(4 * parts.total(), |scratch| {
        let launches =
            Launches { gpu, layer, dtype: x.dtype(), n, parts, scratch, tickets: tickets.address() };
        launches.norm_product(x, &layer.norms[0], &layer.sites[0]);
        for group in &layer.groups {
            launches.attend(group, (&mut k, &mut v), &mixed);
        }
        launches.add(mixed.as_view(), x, &middle);
        launches.norm_product(middle.as_view(), &layer.norms[1], &layer.sites[2]);
        launches.add_activated(middle.as_view(), &y);
    });
}

impl Launches<'_, '_> {
    /// Addresses of the parts of the scratch.
    fn places(&self) -> [u64; 4] {
        let Parts { open, open_xa, joint, .. } = self.parts;
        let mut at = self.scratch;
        let mut next = |len: usize| {
            let here = at;
            at += 4 * len.next_multiple_of(4) as u64;
            here
        };
        [next(open), next(open_xa), next(joint), at]
    }

    fn joint(&self) -> Argument {
        let [_, _, parts, xa] = self.places();
        Argument::structure(Joint { parts, xa, tickets: self.tickets })
    }

    /// What [`Launches::norm_product`] leaves of `site`.
    fn open(&self, site: &Site) -> Argument {
        let [parts, xa, ..] = self.places();
        let splits = int(shares(site.weight.rows));
        Argument::structure(Open { parts, xa, bias: site.bias.address(), splits })
    }

    /// Starts the first kernel for a single row, which has half the registers, or the second one.
    fn launch(&self, kernels: [&str; 2], grid: Grid, arguments: &[Argument], deltas: &[&Site]) {
        let mut all = arguments.to_vec();
        deltas.iter().for_each(|site| all.extend(site.raw_deltas()));
        let kernel = kernels[usize::from(self.n > 1)];
        self.gpu.launch(&IMAGE, &named(kernel, self.dtype), grid, &all);
    }

    /// Shares of `norm(x) W`, and of `norm(x) A^T`.
    fn norm_product(&self, x: View, norm: &Norm, site: &Site) {
        let (rows, cols) = (site.weight.rows, site.weight.cols);
        let [parts, xa, ..] = self.places();
        let [n, rows_, cols_, size] = [self.n, rows, cols, share(rows)].map(Argument::int);
        let arguments = arguments![
            x,
            parameter(norm.gain),
            parameter(norm.bias),
            norm.epsilon,
            site.weight.data,
            parts,
            xa,
            n,
            rows_,
            cols_,
            size
        ];
        let blocks = cols.div_ceil(TILE) + usize::from(!site.deltas.is_empty());
        let grid = Grid::of((blocks, shares(rows), 1), 256).with_shared(4 * self.n * share(rows));
        self.launch(["decode_norm_product_row", "decode_norm_product"], grid, arguments, &[site]);
    }

    /// Attention of a group, whose keys and values go to the cache.
    fn attend(&self, group: &Group, cache: (&mut ViewMut, &mut ViewMut), mixed: &ViewMut) {
        let Layer { heads, scale, capacity, sites: [site, ..], .. } = self.layer;
        let c = site.weight.rows;
        let width = c / heads;
        let p = group.prefix.map_or(0, |(_, p)| p);
        let [pk, pv] = match group.prefix {
            Some((prefix, _)) => [RawHeads::of(prefix.k), RawHeads::of(prefix.v)],
            None => [RawHeads::NONE; 2],
        };
        let (k, v) = (cache.0.address(), cache.1.address());
        let (counts, slots) = (group.at.counts.address(), group.at.slots.address());
        let rows = RawRows { counts, slots, first: int(group.first), n: int(self.n) };
        let shape = raw_shape(
            Shape {
                batch: self.n,
                queries: 1,
                past: capacity - 1,
                heads: *heads,
                width,
                prefix: p,
                arithmetic: Arithmetic::F32,
            },
            *scale,
        );
        let splits = key_shares(p + capacity);
        let [_, _, parts, _] = self.places();
        let arguments = arguments![
            self.open(site),
            Argument::structure(RawCache { k, v, row: (capacity * c) as i64 }),
            Argument::structure(pk),
            Argument::structure(pv),
            shape,
            Argument::structure(rows),
            Argument::int(KEYS),
            parts,
            self.tickets,
            mixed
        ];
        let grid = Grid::of((splits, *heads, group.rows), 128);
        let grid = grid.with_shared(4 * (5 * width + 8 + site.ranks()));
        self.launch(["decode_attend"; 2], grid, arguments, &[site]);
    }

    /// Sizes, grid and shared memory of a product that is added to a residual, after `more` ranks.
    fn sizes(&self, site: &Site, more: usize) -> (Argument, Grid) {
        let (inputs, cols) = (site.weight.rows, site.weight.cols);
        let size = share(inputs);
        let raw = RawSizes { n: int(self.n), inputs: int(inputs), cols: int(cols), size: int(size) };
        let grid = Grid::of((cols.div_ceil(TILE), shares(inputs), 1), 256);
        (Argument::structure(raw), grid.with_shared(4 * self.n * (size + site.ranks() + more)))
    }

    /// `middle = x + mixed W + ..`.
    fn add(&self, mixed: View, x: View, middle: &ViewMut) {
        let site = &self.layer.sites[1];
        let (sizes, grid) = self.sizes(site, 0);
        let arguments = arguments![mixed, site.weight.data, x, site.bias, middle, sizes, self.joint()];
        self.launch(["decode_add_row", "decode_add"], grid, arguments, &[site]);
    }

    /// `y = middle + f(what the product before left) W + ..`.
    fn add_activated(&self, middle: View, y: &ViewMut) {
        let [.., before, site] = &self.layer.sites;
        let (sizes, grid) = self.sizes(site, before.ranks());
        let arguments = arguments![
            activation::cuda::number(self.layer.activation),
            self.open(before),
            site.weight.data,
            middle,
            site.bias,
            y,
            sizes,
            self.joint()
        ];
        self.launch(["decode_add_activated_row", "decode_add_activated"], grid, arguments, &[before, site]);
    }
}
