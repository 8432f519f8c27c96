// SPDX-License-Identifier: GPL-2.0-only
/* The node: one file at a time, its requests and mappings, and its end. */
#include <linux/eventfd.h>
#include <linux/fs.h>
#include <linux/nospec.h>
#include <linux/security.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "internal.h"

static int may_open(struct ugds_device *ud)
{
	if (ud->gone)
		return -ENODEV;
	if (ud->file)
		return -EBUSY;
	if (ugds_is_isolated(ud->pdev))
		return 0;
	/* As for /dev/mem. A kernel that is locked down is so for root, too. */
	if (!capable(CAP_SYS_RAWIO))
		return -EPERM;
	return security_locked_down(LOCKDOWN_PCI_ACCESS);
}

/* A controller that has stopped, and may reach memory from now on. */
static int start(struct ugds_device *ud)
{
	u64 generation;
	u32 method;
	int ret;

	ret = ugds_stop(ud, false, &method, &generation);
	if (!ret)
		ret = ugds_fault("open_stop");
	if (ret)
		return ret;
	ugds_vectors_on(ud);
	/* Nothing of an earlier file's can be meant by what wedged it. */
	ret = ugds_go(ud, generation);
	if (ret)
		ugds_vectors_off(ud);
	return ret;
}

static struct ugds_file *make_file(struct ugds_device *ud, struct file *filp)
{
	struct ugds_file *file;

	if (ugds_fault("open_file"))
		return NULL;
	file = kzalloc(sizeof(*file), GFP_KERNEL_ACCOUNT);
	if (!file)
		return NULL;
	file->ud = ud;
	file->mapping = filp->f_mapping;
	file->ranges = RB_ROOT_CACHED;
	file->next_offset = UGDS_COHERENT_OFFSET;
	xa_init(&file->tokens);
	xa_init(&file->ones);
	mutex_init(&file->map_lock);
	INIT_LIST_HEAD(&file->coherent);
	return file;
}

static int ugds_open(struct inode *inode, struct file *filp)
{
	struct ugds_device *ud = container_of(inode->i_cdev,
					      struct ugds_device, cdev);
	struct ugds_file *file;
	int ret;

	ret = mutex_lock_killable(&ud->lock);
	if (ret)
		return ret;
	ret = may_open(ud);
	if (ret)
		goto unlock;
	file = make_file(ud, filp);
	if (!file) {
		ret = -ENOMEM;
		goto unlock;
	}
	ret = start(ud);
	if (ret) {
		kfree(file);
		goto unlock;
	}
	ud->file = file;
	filp->private_data = file;
	get_device(&ud->dev);
	nonseekable_open(inode, filp);
unlock:
	mutex_unlock(&ud->lock);
	return ret;
}

void ugds_dismantle(struct ugds_file *file)
{
	ugds_interrupts_off(file);
	ugds_ledger_release_all(file);
	ugds_vectors_off(file->ud);
}

static int ugds_release(struct inode *inode, struct file *filp)
{
	struct ugds_file *file = filp->private_data;
	struct ugds_device *ud = file->ud;
	u64 generation;
	u32 method;

	mutex_lock(&ud->lock);
	if (!ud->gone) {
		/*
		 * Without bus mastering nothing is reached, even by one that
		 * does not stop. It cannot be opened again until it does.
		 */
		ugds_stop(ud, false, &method, &generation);
		ugds_dismantle(file);
		ugds_event_off(ud);
		ud->file = NULL;
	}
	mutex_unlock(&ud->lock);
	ugds_registers_free(file);
	xa_destroy(&file->tokens);
	kfree(file);
	put_device(&ud->dev);
	return 0;
}

static int request_info(struct ugds_file *file, void *request, u32 *reason,
			struct ugds_mapping **made)
{
	struct ugds_drv_info *info = request;
	struct ugds_device *ud = file->ud;

	memset_after(info, 0, flags);
	info->api_version = UGDS_DRV_API_VERSION;
	if (ud->translated)
		info->capabilities |= UGDS_DRV_CAP_TRANSLATED;
	if (ud->flr)
		info->capabilities |= UGDS_DRV_CAP_FLR;
	if (IS_ENABLED(CONFIG_DMA_SHARED_BUFFER))
		info->capabilities |= UGDS_DRV_CAP_DMABUF;
	if (IS_ENABLED(CONFIG_PCI_P2PDMA))
		info->capabilities |= UGDS_DRV_CAP_P2PDMA;
#ifdef UGDS_DRV_NVIDIA
	info->capabilities |= UGDS_DRV_CAP_NVIDIA_P2P;
#endif
#ifdef UGDS_DRV_FAULTS
	info->capabilities |= UGDS_DRV_CAP_FAULTS;
#endif
	info->pci_domain = ud->pci_domain;
	info->pci_address = ud->pci_address;
	info->state = READ_ONCE(ud->state);
	info->vectors = ud->vectors;
	info->bar_size = ud->bar_size;
	info->bar_offset = UGDS_DRV_MMAP_BAR0;
	info->dma_bits = ud->dma_bits;
	info->coherent_max = UGDS_COHERENT_MAX;
	info->coherent_total = UGDS_COHERENT_TOTAL;
	info->map_max = UGDS_MAP_MAX;
	return 0;
}

static int request_state(struct ugds_file *file, void *request, u32 *reason,
			 struct ugds_mapping **made)
{
	struct ugds_drv_status *status = request;
	struct ugds_device *ud = file->ud;

	spin_lock(&ud->state_lock);
	status->generation = ud->generation;
	status->state = ud->state;
	status->cause = ud->cause;
	spin_unlock(&ud->state_lock);
	status->mapping = ugds_ledger_state(file, status->token);
	return 0;
}

#define REQUEST(what, type, function_, flags_, quick_)			\
	[_IOC_NR(UGDS_DRV_##what)] = {					\
		.function = (function_),				\
		.size = sizeof(struct type),				\
		.reason_at = offsetof(struct type, reason),		\
		.flags = (flags_),					\
		.quick = (quick_),					\
	}

/* `quick`: waits for nothing, and answers when the device has gone, too. */
static const struct {
	ugds_request function;
	u32 size;
	u32 reason_at;
	u32 flags;
	bool quick;
} requests[] = {
	REQUEST(GET_INFO, ugds_drv_info, request_info, 0, true),
	REQUEST(GET_STATE, ugds_drv_status, request_state, 0, true),
	REQUEST(ALLOC_COHERENT, ugds_drv_alloc, ugds_request_alloc, 0, false),
	REQUEST(MAP_HOST, ugds_drv_map_host, ugds_request_map_host,
		UGDS_DRV_MAP_SHARED_ENDS, false),
	REQUEST(MAP_DMABUF, ugds_drv_map_dmabuf, ugds_request_map_dmabuf,
		UGDS_DRV_DMABUF_REQUIRE_PEER | UGDS_DRV_DMABUF_ALLOW_REVOCABLE |
		UGDS_DRV_DMABUF_SHARED_ENDS, false),
	REQUEST(MAP_NVIDIA, ugds_drv_map_nvidia, ugds_request_map_nvidia, 0,
		false),
	REQUEST(UNMAP, ugds_drv_unmap, ugds_request_unmap, 0, false),
	REQUEST(SET_INTERRUPTS, ugds_drv_interrupts, ugds_request_interrupts, 0,
		false),
	REQUEST(RESET, ugds_drv_reset, ugds_request_reset,
		UGDS_DRV_RESET_WITH_FLR, false),
	REQUEST(SET_EVENT_FD, ugds_drv_event, ugds_request_event, 0, false),
};

union any_request {
	struct {
		u32 argsz;
		u32 flags;
	};
	struct ugds_drv_info info;
	struct ugds_drv_status status;
	struct ugds_drv_alloc alloc;
	struct ugds_drv_map_host map_host;
	struct ugds_drv_map_dmabuf map_dmabuf;
	struct ugds_drv_map_nvidia map_nvidia;
	struct ugds_drv_unmap unmap;
	struct ugds_drv_interrupts interrupts;
	struct ugds_drv_reset reset;
	struct ugds_drv_event event;
};

static int read_request(union any_request *any, u32 size, void __user *from)
{
	u32 argsz;

	if (get_user(argsz, (u32 __user *)from))
		return -EFAULT;
	if (argsz < size)
		return -EINVAL;
	if (argsz > PAGE_SIZE)
		return -E2BIG;
	return copy_struct_from_user(any, size, from, argsz);
}

/* The answer did not arrive, so what was made must not stay without an owner. */
static int answer(struct ugds_file *file, union any_request *any, u32 size,
		  void __user *to, struct ugds_mapping *made)
{
	int ret = ugds_fault("answer");

	if (!ret && copy_to_user(to, any, size))
		ret = -EFAULT;
	if (ret && made)
		ugds_ledger_release(file, made);
	return ret;
}

static long ugds_ioctl(struct file *filp, unsigned int command,
		       unsigned long argument)
{
	struct ugds_file *file = filp->private_data;
	void __user *user = (void __user *)argument;
	unsigned int number = _IOC_NR(command);
	struct ugds_mapping *made = NULL;
	union any_request any = {};
	u32 reason = UGDS_DRV_REASON_NONE;
	int ret, told;

	if (command != _IO(UGDS_DRV_IOC_TYPE, number) ||
	    number >= ARRAY_SIZE(requests))
		return -ENOTTY;
	number = array_index_nospec(number, ARRAY_SIZE(requests));
	ret = read_request(&any, requests[number].size, user);
	if (ret)
		return ret;
	if (!requests[number].quick) {
		ret = mutex_lock_killable(&file->ud->lock);
		if (ret)
			return ret;
	}
	if (any.flags & ~requests[number].flags) {
		reason = UGDS_DRV_REASON_ARGUMENT;
		ret = -EINVAL;
	} else if (!requests[number].quick && file->ud->gone) {
		reason = UGDS_DRV_REASON_REMOVED;
		ret = -ENODEV;
	} else {
		ret = requests[number].function(file, &any, &reason, &made);
	}
	*(u32 *)((u8 *)&any + requests[number].reason_at) = reason;
	told = answer(file, &any, requests[number].size, user, made);
	if (!requests[number].quick)
		mutex_unlock(&file->ud->lock);
	return told ? told : ret;
}

static int ugds_mmap(struct file *filp, struct vm_area_struct *vma)
{
	struct ugds_file *file = filp->private_data;

	if (!(vma->vm_flags & VM_SHARED) || (vma->vm_flags & VM_EXEC))
		return -EINVAL;
	vm_flags_clear(vma, VM_MAYEXEC);
	if (vma->vm_pgoff >= UGDS_COHERENT_OFFSET >> PAGE_SHIFT)
		return ugds_coherent_mmap(file, vma);
	return ugds_registers_mmap(file, vma);
}

const struct file_operations ugds_fops = {
	.owner = THIS_MODULE,
	.open = ugds_open,
	.release = ugds_release,
	.unlocked_ioctl = ugds_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.mmap = ugds_mmap,
};
