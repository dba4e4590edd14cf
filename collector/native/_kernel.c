/* Compiled functions for the tasks that dominate the time of small environment steps. Each task is
   one call.

   The extension is optional. `kernel.py` documents every function. Without the extension, Python
   code does the same work. `storage/engine/_rows.h` defines tables and the rules of ownership.

     table of                the table is kept        the arrays at its addresses are kept
                             alive by                 alive by
     number_slots            CompiledSlabTable._table CompiledSlabTable (columns, outputs),
                                                      LaneState (state)
     are_inside              SlotChecks.table         _SlotCheck: values in the slab, and bounds
     SLAB, in store_slots    SlotRows.slab            the slab (rows, transitions), its driver
                                                      (used, on its board; pending),
                                                      HeldRows of the Rollout (held, marks)
     masks of agents, in store_slots  SlotRows.amounts  the slab
     a batch, in store_slots SlotRows.batch           targets: its tensors, kept alive by
                                                      SlotRows.batch too; sources: the slab's
                                                      columns
     store_slots             SlotRows._plan, a tuple  see the tables of the plan, listed above
     the blocks of counts    SlotRows._plan           Header (commit), BatchWriter (run),
                                                      Ledger (ledger, shown), HeldRows (held),
                                                      EpisodeRing (log, and its records; FastPath
                                                      keeps the ring alive); SlotRows refers to all
                                                      six
     put_step                a step of a Stepper      the slab, whose slot the step writes
     step_lanes              SequentialStep           SequentialStep (rewards, flags, the lane),
                                                      LaneResults (finals, entries of infos) */

#include "../../storage/engine/_rows.h"

/* nth_marked(marks, uniform, chosen): choose a marked entry of each row of `marks`, one byte per
   entry, and write its index to `chosen`, int64. A double in [0, 1) of `uniform` selects the
   entry. If a row has no mark, all its entries count as marked. The caller owns the arrays. The
   function holds their buffers until it returns. */
static PyObject *nth_marked(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)self;
    Py_buffer buffers[3];
    if (want(given, 3) < 0 || open_buffers(args, buffers, 3) < 0)
        return NULL;
    const Py_buffer *marks = &buffers[0], *uniform = &buffers[1], *chosen = &buffers[2];
    const int64_t rows = chosen->len / (Py_ssize_t)sizeof(int64_t);
    const int64_t choices = rows ? marks->len / rows : 0;
    const int fit =
        choices * rows == marks->len && (Py_ssize_t)(rows * sizeof(double)) == uniform->len;
    const uint8_t *row = (const uint8_t *)marks->buf;
    for (int64_t i = 0; fit && i < rows; i++, row += choices) {
        int64_t count = 0, index = 0;
        for (int64_t k = 0; k < choices; k++)
            count += row[k] != 0;
        const int any = count == 0;
        if (any)
            count = choices;
        int64_t left = (int64_t)(((const double *)uniform->buf)[i] * (double)count);
        if (left > count - 1) /* rounding can make the product equal to the count */
            left = count - 1;
        for (; index < choices - 1; index++)
            if ((any || row[index]) && left-- == 0)
                break;
        ((int64_t *)chosen->buf)[i] = index;
    }
    release_buffers(buffers, 3);
    if (!fit) {
        PyErr_SetString(PyExc_ValueError, "marks, numbers and choices differ in their rows");
        return NULL;
    }
    Py_RETURN_NONE;
}

#include "_number.c"
#include "_store.c"
#include "_step.c"

static PyMethodDef functions[] = {
    {"number_slots", (PyCFunction)(void (*)(void))number_slots, METH_FASTCALL, NULL},
    {"are_inside", (PyCFunction)(void (*)(void))are_inside, METH_FASTCALL, NULL},
    {"store_slots", (PyCFunction)(void (*)(void))store_slots, METH_FASTCALL, NULL},
    {"put_step", (PyCFunction)(void (*)(void))put_step, METH_FASTCALL, NULL},
    {"put_entry", (PyCFunction)(void (*)(void))put_entry, METH_FASTCALL, NULL},
    {"step_lanes", (PyCFunction)(void (*)(void))step_lanes, METH_FASTCALL, NULL},
    {"nth_marked", (PyCFunction)(void (*)(void))nth_marked, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static const Names lists[] = {
    {"NUMBERING", NUMBERING(NAME)}, {"EPISODE", EPISODE(NAME)},   {"CHECK", CHECK(NAME)},
    {"DTYPES", DTYPES(NAME)},       {"RUN", RUN(NAME)},           {"LEDGER", LEDGER(NAME)},
    {"HELD", HELD(NAME)},           {"LOG", LOG(NAME)},           {"BLOCKS", BLOCK(NAME)},
    {"SLAB", SLAB(NAME)},           {"PIECE", PIECE(NAME)},       {"PLAN", PLAN(NAME)},
    {"MASK", MASK(NAME)},           {"BATCH", BATCH(NAME)},       {"COPY", COPY(NAME)},
    {"MARKS", MARKS(NAME)},         {"SLOT", SLOT(NAME)},         {"OBSERVATION", OBSERVATION(NAME)},
    {"LANES", LANES(NAME)},         {"MODES", MODES(NAME)},       {"READERS", READERS(NAME)},
    {"CALLS", CALLS(NAME)},         {"ENTRY", ENTRY(NAME)},       {"VALUE", VALUE(NAME)},
    {"VALUES", VALUES(NAME)},
};

static int export_lists(PyObject *module)
{
    return export_names(module, lists, sizeof lists / sizeof *lists);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)export_lists}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_kernel", NULL, 0, functions, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernel(void)
{
    return PyModuleDef_Init(&module);
}
