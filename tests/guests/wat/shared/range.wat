  (func (export "{{range}}") (result i32)
    (f64.store (i32.const 192) (f64.const 0))
    (f64.store (i32.const 200) (f64.const 1))
    (i32.const 192))
