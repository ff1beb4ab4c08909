  ;; The name is that of the file. A reward with range 0 to 1 (or the kind that the world exports), without inputs and settings.
  (data (i32.const 1024) "{{name}}")
  (data (i32.const 1280) "0.1.0")
  (func $describe (export "querl:plugin/info@0.1.0#describe") (result i32)
    (i32.store (i32.const 64) (i32.const 1024))
    (i32.store (i32.const 68) (i32.const {{n_name_bytes}}))
    (i32.store (i32.const 72) (i32.const 1280))
    (i32.store (i32.const 76) (i32.const 5))
    ;; One kind: the case of a variant of 12 bytes.
    (i32.store (i32.const 80) (i32.const 320))
    (i32.store (i32.const 84) (i32.const 1))
    (i32.store (i32.const 320) (i32.const {{kind}}))
    ;; The range. The settings before it and the inputs after it are empty lists.
    (i32.store (i32.const 96) (i32.const {{has_range}}))
    (f64.store (i32.const 104) (f64.const 0))
    (f64.store (i32.const 112) (f64.const 1))
    (call $describe_odd)
    (i32.const 64))
