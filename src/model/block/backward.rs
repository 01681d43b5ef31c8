//! The backward of a block: the lines of its forward, upwards.

use super::{Block, Gradients, Saved, rows};
use crate::{
    device::View,
    kernels::{
        activation,
        attention::{self, Seen},
        gather::spread,
        layernorm,
    },
    model::{
        arch::Site,
        buffers::{BackwardWork, BlockBuffers, SharedScratch, Workspace},
        sites::SiteGradients,
    },
};

impl Block<'_> {
    /// Backward: `back.grad` holds the gradient of the block's output `(m, c)` on entry and that of its input
    /// `x (n, c)` on exit (left undefined unless `input_gradient`), and `to` grows by those of the trainables.
    pub fn backward(
        &self,
        x: View,
        saved: Saved,
        workspace: &mut Workspace,
        back: &mut BackwardWork,
        to: &mut Gradients,
        input_gradient: bool,
    ) -> BlockBuffers {
        let Saved(mut kept) = saved;
        self.mlp_half_backward(&mut kept, workspace, back, to);
        self.attention_half_backward(x, &mut kept, workspace, back, to, input_gradient);
        kept
    }

    /// In the forward pass this was `y = middle + c_proj(f(c_fc(ln_2(middle))))`.
    fn mlp_half_backward(
        &self,
        kept: &mut BlockBuffers,
        workspace: &mut Workspace,
        back: &mut BackwardWork,
        to: &mut Gradients,
    ) {
        let (n, c, f) = (self.outputs(), self.config.width, self.config.inner);
        let inner = rows!(kept.inner, n, f);
        let kind = self.config.activation;
        if self.reads_input(Site::MlpProj) {
            activation::forward(kind, inner, workspace.shared.activated_mut().slice(0, n * f));
        }
        let (activated, d_inner) = workspace.shared.wide_mut();
        // Nothing of it where no adapter needs it.
        let activated = activated.slice(0, activated.len().min(n * f));
        let d_inner = Some(d_inner.slice(0, n * f));
        self.linear_backward(
            Site::MlpProj,
            rows!(back.grad, n, c),
            activated,
            kept,
            SiteGradients {
                d_xa: &mut back.d_xa,
                scaled: &mut workspace.scaled,
                dx: d_inner,
                input_of: Some((kind, inner)),
            },
            to,
        );

        let middle = rows!(kept.outputs.middle, n, c);
        let of = (workspace.shared.wide().slice(0, n * f), middle, rows!(kept.statistics.stats_2, n, 2));
        let gradients = (rows!(mut back.narrow, n, c), rows!(mut back.grad, n, c));
        if self.normed_linear_backward(Site::CFc, of, &kept.statistics.xa, gradients, to) {
            return;
        }
        let (binding, norm) = self.norm(self.group(), Site::CFc);
        if self.reads_input(Site::CFc) {
            layernorm::forward(
                middle,
                norm,
                rows!(mut workspace.normed, n, c),
                rows!(mut kept.statistics.stats_2, n, 2),
            );
        }
        let d_normed = rows!(mut back.narrow, n, c);
        let (d_inner, normed) = (workspace.shared.wide().slice(0, n * f), rows!(workspace.normed, n, c));
        let buffers = SiteGradients::new(&mut back.d_xa, &mut workspace.scaled, Some(d_normed));
        self.linear_backward(Site::CFc, d_inner, normed, kept, buffers, to);
        let (d_normed, stats) = (rows!(back.narrow, n, c), rows!(kept.statistics.stats_2, n, 2));
        let middle = rows!(kept.outputs.middle, n, c);
        binding.gradients(d_normed, middle, stats, to.store.reborrow());
        layernorm::backward(d_normed, middle, stats, norm, rows!(mut back.grad, n, c));
    }

    /// In the forward pass this was `middle = x + c_proj(attention(c_attn(ln_1(x))))`.
    fn attention_half_backward(
        &self,
        x: View,
        kept: &mut BlockBuffers,
        workspace: &mut Workspace,
        back: &mut BackwardWork,
        to: &mut Gradients,
        input_gradient: bool,
    ) {
        let (n, c) = (self.cells(), self.config.width);
        self.attention_output_backward(kept, workspace, back, to);
        self.attention_backward(kept, &mut workspace.shared, back, to);

        let (binding, norm) = self.norm(self.group(), Site::CAttn);
        if !self.trains(Site::CAttn) && !binding.trains() && !input_gradient {
            return;
        }
        let of = (workspace.shared.wide().slice(0, n * 3 * c), x, rows!(kept.statistics.stats_1, n, 2));
        let gradients = (rows!(mut back.narrow, n, c), rows!(mut back.grad, n, c));
        if input_gradient && self.normed_linear_backward(Site::CAttn, of, &kept.statistics.xa, gradients, to)
        {
            return;
        }
        if self.reads_input(Site::CAttn) {
            layernorm::forward(
                x,
                norm,
                rows!(mut workspace.normed, n, c),
                rows!(mut kept.statistics.stats_1, n, 2),
            );
        }
        let wants_dx = input_gradient || binding.trains() || self.needs_dx(Site::CAttn);
        let d_normed = wants_dx.then(|| rows!(mut back.narrow, n, c));
        let (d_qkv, normed) = (workspace.shared.wide().slice(0, n * 3 * c), rows!(workspace.normed, n, c));
        let buffers = SiteGradients::new(&mut back.d_xa, &mut workspace.scaled, d_normed);
        self.linear_backward(Site::CAttn, d_qkv, normed, kept, buffers, to);
        let (d_normed, stats) = (rows!(back.narrow, n, c), rows!(kept.statistics.stats_1, n, 2));
        binding.gradients(d_normed, x, stats, to.store.reborrow());
        if input_gradient {
            layernorm::backward(d_normed, x, stats, norm, rows!(mut back.grad, n, c));
        }
    }

    /// From the gradient of the middle `(m, c)` in `back.grad` to that of attention's output `(n, c)` in `back.narrow`;
    /// the former becomes `(n, c)`. No gradient comes from tokens that are not wanted.
    fn attention_output_backward(
        &self,
        kept: &BlockBuffers,
        workspace: &mut Workspace,
        back: &mut BackwardWork,
        to: &mut Gradients,
    ) {
        let (n, m, c) = (self.cells(), self.outputs(), self.config.width);
        let mixed = self.pick(rows!(kept.outputs.mixed, n, c), workspace.shared.wide_mut().1.slice(0, m * c));
        let d_mixed = if self.wanted.is_some() {
            rows!(mut workspace.normed, m, c)
        } else {
            rows!(mut back.narrow, m, c)
        };
        let dy = rows!(back.grad, m, c);
        let buffers = SiteGradients::new(&mut back.d_xa, &mut workspace.scaled, Some(d_mixed));
        self.linear_backward(Site::AttnProj, dy, mixed, kept, buffers, to);
        if let Some(wanted) = self.wanted {
            spread(rows!(workspace.normed, m, c), wanted, rows!(mut back.narrow, n, c), c);
            // Both are (n, c) of one type.
            std::mem::swap(&mut workspace.normed, &mut back.grad);
            spread(rows!(workspace.normed, m, c), wanted, rows!(mut back.grad, n, c), c);
        }
    }

    /// From the gradient of attention's output in `back.narrow` to that of qkv in `shared`.
    fn attention_backward(
        &self,
        kept: &BlockBuffers,
        shared: &mut SharedScratch,
        back: &mut BackwardWork,
        to: &mut Gradients,
    ) {
        let (n, c, layers) = (self.cells(), self.config.width, self.config.layers);
        let group = self.group();
        let shape = self.shape(group, 0);
        let seen = Seen {
            qkv: rows!(kept.qkv, n, 3 * c),
            prefix: self.prefix(group),
            starts: self.starts,
            out: rows!(kept.outputs.mixed, n, c),
            lse: rows!(kept.statistics.lse, n, self.config.heads),
        };
        let d_prefix = rows!(mut back.d_prefix, group.batch * 2 * shape.prefix, c);
        let d_qkv = shared.wide_mut().1.slice(0, n * 3 * c);
        attention::backward(rows!(back.narrow, n, c), seen, self.scale(), shape, d_qkv, d_prefix);
        if shape.prefix > 0 {
            let places = (2 * layers * c, 2 * self.layer * c, (2 * self.layer + 1) * c);
            let parts = rows!(back.d_prefix, group.batch * 2 * shape.prefix, c);
            attention::sum_prefix(parts, shape, to.prefix.reborrow(), places);
        }
    }
}
