  ;; The name is that of the file.
  (data (i32.const 1024) "{{name}}")
  (data (i32.const 1280) "0.1.0")
  (func (export "querl:plugin/info@0.1.0#describe") (result i32)
    (i32.store (i32.const 64) (i32.const 1024))
    (i32.store (i32.const 68) (i32.const {{n_name_bytes}}))
    (i32.store (i32.const 72) (i32.const 1280))
    (i32.store (i32.const 76) (i32.const 5))
    (i32.const 64))
