//! The tensors of one flat F32 store, and the groups that an optimizer treats alike.

use std::ops::Range;

use crate::{Error, Result};

/// Most values a set may hold (32 GiB of F32): more is likely a typing error.
const MOST_VALUES: usize = 1 << 33;

/// The tensors of one flat F32 store, one after another without gaps.
#[derive(Debug, Clone, PartialEq)]
pub struct Layout {
    /// The tensors in their order in the store.
    pub tensors: Vec<TensorSlot>,
    /// Number of values in the store.
    pub len: usize,
    /// The groups that [`TensorSlot::group`] counts; the first is [`Group::DEFAULT`].
    pub groups: Vec<Group>,
}

/// A named tensor inside the flat store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSlot {
    /// Name, unique in the layout; that of the PEFT file where the file has the tensor.
    pub name: String,
    /// Sizes, outermost first; row-major.
    pub shape: Vec<usize>,
    /// Index of its first value in the store.
    pub offset: usize,
    /// Index into [`Layout::groups`].
    pub group: usize,
    /// Name of the method that the tensor belongs to.
    pub method: &'static str,
}

/// How an optimizer treats the tensors of a group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Group {
    /// The learning rate is multiplied by this.
    pub lr_factor: f64,
    /// Decoupled weight decay; `None` for the optimizer's own.
    pub weight_decay: Option<f64>,
    /// Whether the values change: a frozen group has no moments and is not part of the gradient's norm.
    pub trainable: bool,
}

/// Consecutive values of the store that one group holds: a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Segment {
    /// Index of the first value in the store.
    pub offset: usize,
    /// Number of values of the tensor.
    pub len: usize,
    /// How an optimizer treats them.
    pub group: Group,
}

impl Group {
    /// The optimizer's own learning rate and decay.
    pub const DEFAULT: Self = Self { lr_factor: 1.0, weight_decay: None, trainable: true };
    /// Values that stay as they began.
    pub const FROZEN: Self = Self { trainable: false, ..Self::DEFAULT };
}

impl Default for Group {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl Segment {
    /// Tensors of these lengths, one after another, all of the default group.
    pub fn of(lens: &[usize]) -> Vec<Self> {
        let mut offset = 0;
        let next = |&len: &usize| {
            offset += len;
            Self { offset: offset - len, len, group: Group::DEFAULT }
        };
        lens.iter().map(next).collect()
    }

    /// Its values in the store.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len
    }
}

impl TensorSlot {
    /// Number of values in the tensor.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the tensor has no values; no slot of a valid layout is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its values in the store.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len()
    }
}

impl Default for Layout {
    fn default() -> Self {
        Self { tensors: Vec::new(), len: 0, groups: vec![Group::DEFAULT] }
    }
}

impl Layout {
    /// The slot of that name.
    pub fn slot(&self, name: &str) -> Option<&TensorSlot> {
        self.tensors.iter().find(|slot| slot.name == name)
    }

    /// The store as an optimizer sees it: a segment for each tensor, in order.
    pub fn segments(&self) -> Vec<Segment> {
        let segment = |slot: &TensorSlot| {
            let group = self.groups.get(slot.group).copied().unwrap_or_default();
            Segment { offset: slot.offset, len: slot.len(), group }
        };
        self.tensors.iter().map(segment).collect()
    }

    /// Number of values that training changes.
    pub fn trainables(&self) -> usize {
        self.segments().iter().filter(|segment| segment.group.trainable).map(|segment| segment.len).sum()
    }

    /// Index of `group`, which is added unless it is there.
    fn group(&mut self, group: Group) -> usize {
        let known = self.groups.iter().position(|known| *known == group);
        known.unwrap_or_else(|| {
            self.groups.push(group);
            self.groups.len() - 1
        })
    }
}

/// Adds the tensors of one method to a layout.
pub(crate) struct Slots<'a> {
    layout: &'a mut Layout,
    method: &'static str,
}

impl<'a> Slots<'a> {
    /// Slots for the method of that name, after those that `layout` has.
    pub fn new(layout: &'a mut Layout, method: &'static str) -> Self {
        Self { layout, method }
    }

    /// Adds a tensor of the default group; its index in the layout.
    ///
    /// # Errors
    /// [`Error::TooLarge`] when the store would be.
    pub fn push(&mut self, name: impl Into<String>, shape: &[usize]) -> Result<usize> {
        self.push_to(Group::DEFAULT, name, shape)
    }

    /// Adds a tensor of `group`, or finds the one of that name that this method added before: modules that
    /// name the same tensor share it.
    ///
    /// # Errors
    /// [`Error::TooLarge`] when the store would be, or when the shared tensor has another shape.
    pub fn push_to(&mut self, group: Group, name: impl Into<String>, shape: &[usize]) -> Result<usize> {
        let (name, shape, layout) = (name.into(), shape.to_vec(), &mut *self.layout);
        let known = layout.tensors.iter().position(|slot| slot.name == name && slot.method == self.method);
        if let Some(known) = known {
            let same = layout.tensors[known].shape == shape;
            return if same { Ok(known) } else { Err(Error::SharedShape { tensor: name, shape }) };
        }
        let len = shape.iter().try_fold(1usize, |product, &n| product.checked_mul(n));
        let end = len.and_then(|len| layout.len.checked_add(len)).filter(|&end| end <= MOST_VALUES);
        let Some(end) = end else { return Err(Error::TooLarge { tensor: name, shape }) };
        let group = layout.group(group);
        layout.tensors.push(TensorSlot { name, shape, offset: layout.len, group, method: self.method });
        layout.len = end;
        Ok(layout.tensors.len() - 1)
    }
}
